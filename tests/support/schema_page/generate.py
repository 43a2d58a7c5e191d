# ruff: noqa
# mypy: ignore-errors
"""Writes pydantic.json, msgspec.json and attrs.json into the folder that is its argument."""

import dataclasses, datetime as dt, decimal, enum, fractions, ipaddress, json, pathlib, re, sys, uuid
from collections import OrderedDict, deque, defaultdict, Counter
from collections.abc import Sequence, Mapping, Iterable
from typing import *
import attrs, msgspec, pydantic
from pydantic import *
import dataclasses
from annotated_types import Len, MultipleOf
from typing_extensions import TypedDict, NotRequired, TypeAliasType


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(enum.Enum):
    A = "a"
    B = 2
    C = None


class Point(BaseModel):
    x: int
    y: int = 0


class Address(BaseModel):
    street: str = Field(min_length=1, max_length=40, description="Street and number", examples=["Main St 1"])
    zip: str = Field(pattern=r"^\d{5}$")


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


class Bird(BaseModel):
    kind: Literal["bird"] = "bird"
    wings: int = 2


class Node(BaseModel):
    name: str
    children: list["Node"] = []


class Linked(BaseModel):
    value: int
    next: Optional["Linked"] = None


class Base(BaseModel):
    id: uuid.UUID


class Derived(Base):
    name: str


class Forbid(BaseModel, extra="forbid"):
    a: int


class Allow(BaseModel, extra="allow"):
    a: int


class Root(RootModel[list[int]]):
    pass


T = TypeVar("T")


class Box(BaseModel, Generic[T]):
    item: T
    count: int


class TD(TypedDict):
    a: int
    b: NotRequired[str]


class NT(NamedTuple):
    a: int
    b: str = "x"


@dataclasses.dataclass
class DC:
    a: int
    b: list[str] = dataclasses.field(default_factory=list)


class Aliased(BaseModel):
    value: int = Field(alias="theValue", title="The value", deprecated=True)


class Computed(BaseModel):
    w: float

    @computed_field
    @property
    def area(self) -> float:
        return self.w


Json1 = TypeAliasType("Json1", "Union[dict[str, Json1], list[Json1], str, int, float, bool, None]")


class User(BaseModel):
    """A user of the shop."""

    id: int = Field(ge=1)
    name: str
    email: EmailStr
    age: int | None = Field(default=None, ge=0, le=150)
    tags: set[str] = set()
    colors: set[Color] = set()
    address: Address | None = None
    pets: list[Annotated[Union[Cat, Dog], Field(discriminator="kind")]] = []
    created: dt.datetime
    balance: decimal.Decimal = Field(max_digits=8, decimal_places=2)
    home: HttpUrl | None = None
    meta: dict[str, Any] = {}


PYDANTIC = dict(
    str=str,
    int=int,
    float=float,
    bool=bool,
    none=None,
    any=Any,
    bytes=bytes,
    object=object,
    decimal=decimal.Decimal,
    decimal_digits=Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)],
    decimal_bounds=Annotated[decimal.Decimal, Field(gt=0, lt=100)],
    datetime=dt.datetime,
    date=dt.date,
    time=dt.time,
    timedelta=dt.timedelta,
    past=PastDate,
    aware=AwareDatetime,
    naive=NaiveDatetime,
    uuid=uuid.UUID,
    uuid4=UUID4,
    path=pathlib.Path,
    filepath=FilePath,
    directory=DirectoryPath,
    secret=SecretStr,
    secret_bytes=SecretBytes,
    email=EmailStr,
    name_email=NameEmail,
    url=AnyUrl,
    http=HttpUrl,
    postgres=PostgresDsn,
    redis=RedisDsn,
    ipv4=IPv4Address if False else ipaddress.IPv4Address,
    ipv6=ipaddress.IPv6Address,
    net=ipaddress.IPv4Network,
    ipany=IPvAnyAddress,
    ipanynet=IPvAnyNetwork,
    ipanyif=IPvAnyInterface,
    pattern=re.Pattern,
    json=Json,
    json_typed=Json[list[int]],
    base64=Base64Str,
    bytesize=ByteSize,
    complex=complex,
    positive=PositiveInt,
    nonneg=NonNegativeInt,
    negative=NegativeFloat,
    finite=FiniteFloat,
    strict=StrictInt,
    multiple=Annotated[int, Field(multiple_of=5, ge=0, le=100)],
    multiple_float=Annotated[float, Field(multiple_of=0.25)],
    int64=Annotated[int, Field(ge=-(2**63), le=2**63 - 1)],
    uint64=Annotated[int, Field(ge=0, le=2**64 - 1)],
    big=Annotated[int, Field(ge=2**63)],
    constr=Annotated[str, StringConstraints(min_length=2, max_length=5, pattern="^[a-z]+$", to_upper=True)],
    list=list,
    list_int=list[int],
    conlist=Annotated[list[int], Len(1, 3)],
    tuple=tuple,
    tuple2=tuple[int, str],
    tuple_rest=tuple[int, ...],
    tuple0=tuple[()],
    set=set[str],
    set_enum=set[Color],
    set_bool=set[bool],
    set_literal=Annotated[set[Literal["a", "b", "c", "d"]], Len(1)],
    set_int=set[int],
    frozenset=frozenset[int],
    deque=deque[int],
    sequence=Sequence[str],
    iterable=Iterable[int],
    dict=dict,
    dict_str=dict[str, int],
    dict_int=dict[int, str],
    dict_enum=dict[Color, int],
    dict_literal=dict[Literal["a", "b"], int],
    dict_pattern=dict[Annotated[str, StringConstraints(pattern="^k")], int],
    dict_uuid=dict[uuid.UUID, int],
    dict_len=dict[Annotated[str, StringConstraints(min_length=1, max_length=3)], int],
    dict_min=Annotated[dict[str, int], Len(1, 2)],
    mapping=Mapping[str, list[int]],
    defaultdict=defaultdict[str, int],
    ordered=OrderedDict[str, int],
    counter=Counter[str],
    optional=Optional[int],
    union=Union[int, str, list[bool]],
    literal=Literal["a", 1, True, None],
    color=Color,
    level=Level,
    mixed=Mixed,
    point=Point,
    address=Address,
    node=Node,
    linked=Linked,
    derived=Derived,
    forbid=Forbid,
    allow=Allow,
    root=Root,
    box=Box[int],
    box_point=Box[Point],
    td=TD,
    nt=NT,
    dc=DC,
    aliased=Aliased,
    computed=Computed,
    json_value=JsonValue,
    json_alias=Json1,
    user=User,
    discriminated=Annotated[Union[Cat, Dog], Field(discriminator="kind")],
    plain_union=Union[Cat, Dog, Bird],
    defaulted=Annotated[Union[Cat, Bird], Field(discriminator="kind")],
    left=Annotated[Union[int, str], Field(union_mode="left_to_right")],
    import_string=ImportString,
    type_=None,
)


def write(name, made):
    lines = (f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in made.items())
    pathlib.Path(sys.argv[1], name + ".json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def pyd():
    made = {}
    for name, t in PYDANTIC.items():
        for mode in ("validation", "serialization"):
            try:
                s = TypeAdapter(t).json_schema(mode=mode)
            except Exception as e:
                print("pydantic", name, mode, type(e).__name__, str(e)[:80].replace("\n", " "))
                continue
            if mode == "serialization" and s == made.get(name):
                continue
            made[name if mode == "validation" else name + " (serialization)"] = s
    return made


write("pydantic", pyd())

M = msgspec


class MPoint(M.Struct):
    x: int
    y: int = 0


class MTuple(M.Struct, array_like=True):
    x: int
    y: str = "a"


class MCat(M.Struct, tag="cat"):
    lives: int


class MDog(M.Struct, tag="dog"):
    good: bool


class MForbid(M.Struct, forbid_unknown_fields=True):
    a: int


class MRename(M.Struct, rename="camel"):
    first_name: str
    opt: int | M.UnsetType = M.UNSET


class MNode(M.Struct):
    name: str
    children: list["MNode"] = []


class MUser(M.Struct, kw_only=True):
    """A user."""

    id: Annotated[int, M.Meta(ge=1, description="Number", examples=[1])]
    name: Annotated[str, M.Meta(min_length=1, max_length=9, pattern="^[A-Z]")]
    tags: set[str] = set()
    pets: list[MCat | MDog] = []
    at: dt.datetime | None = None
    scores: dict[str, float] = {}


TYPES = dict(
    str=str,
    int=int,
    float=float,
    bool=bool,
    none=None,
    any=Any,
    bytes=bytes,
    bytearray=bytearray,
    datetime=dt.datetime,
    naive=Annotated[dt.datetime, M.Meta(tz=False)],
    date=dt.date,
    time=dt.time,
    timedelta=dt.timedelta,
    uuid=uuid.UUID,
    decimal=decimal.Decimal,
    list=list,
    list_int=list[int],
    set=set[int],
    frozenset=frozenset[str],
    tuple2=tuple[int, str],
    tuple_rest=tuple[int, ...],
    dict=dict,
    dict_str=dict[str, int],
    dict_int=dict[int, str],
    dict_enum=dict[Color, int],
    dict_len=dict[Annotated[str, M.Meta(min_length=1)], int],
    dict_min=Annotated[dict[str, int], M.Meta(min_length=1)],
    optional=Optional[int],
    union=Union[int, str, list[bool]],
    literal=Literal["a", "b"],
    literal_int=Literal[1, 2],
    literal_none=Literal["a", None],
    color=Color,
    level=Level,
    conint=Annotated[int, M.Meta(gt=0, lt=10)],
    multiple=Annotated[int, M.Meta(multiple_of=5, ge=0)],
    conlist=Annotated[list[int], M.Meta(min_length=1, max_length=3)],
    extra=Annotated[str, M.Meta(title="T", extra_json_schema={"default": "x", "format": "snake"})],
    td=TD,
    nt=NT,
    dc=DC,
    raw=M.Raw,
)
STRUCTS = dict(
    point=MPoint,
    tuple_struct=MTuple,
    tagged=Union[MCat, MDog],
    tagged_list=list[Union[MCat, MDog]],
    forbid=MForbid,
    rename=MRename,
    node=MNode,
    user=MUser,
)


def ms(types):
    made = {}
    for name, t in types.items():
        try:
            made[name] = M.json.schema(t)
        except Exception as e:
            print("msgspec", name, type(e).__name__, str(e)[:80])
    return made


write("msgspec", ms(TYPES | STRUCTS))


@attrs.define
class APoint:
    x: int
    y: int = 0


@attrs.define
class AUser:
    """A user, as attrs defines one."""

    name: str
    color: Color
    tags: set[str] = attrs.field(factory=set)
    scores: dict[str, float] = attrs.field(factory=dict)
    home: APoint | None = None
    at: dt.datetime | None = None
    raw: bytes = b""
    pair: tuple[int, str] = (1, "a")


@attrs.define
class ANode:
    name: str
    children: list["ANode"] = attrs.field(factory=list)


@attrs.frozen(kw_only=True)
class AFrozen:
    level: Level
    kind: Literal["a", "b"] = "a"
    ids: frozenset[int] = frozenset()


@attrs.define
class ABox(Generic[T]):
    item: T


write(
    "attrs",
    ms(
        dict(
            point=APoint,
            user=AUser,
            node=ANode,
            frozen=AFrozen,
            box=ABox[int],
            many=list[APoint],
            by_name=dict[str, APoint],
        )
    ),
)
print(
    {m.__name__: getattr(m, "__version__", getattr(m, "VERSION", "?")) for m in (pydantic, msgspec, attrs)},
    sys.version.split()[0],
)
