// Writes zod-*.json into the folder that is its argument: npm install zod@4.6.7 && node generate.mjs FOLDER
import { z } from "zod";
import { writeFileSync } from "fs";
const Cat = z.object({ kind: z.literal("cat"), lives: z.int() });
const Dog = z.object({ kind: z.literal("dog"), good: z.boolean() });
const Node = z.object({ name: z.string(), get children() { return z.array(Node); } });
const page = {
  string: z.string(), short: z.string().min(1).max(20), pattern: z.string().regex(/^[a-z]+$/i), lower: z.string().lowercase(),
  prefix: z.string().startsWith("ab").endsWith("yz").includes("m"),
  email: z.email(), uuid: z.uuid(), uuid4: z.uuidv4(), guid: z.guid(), url: z.url(), httpUrl: z.httpUrl(), hostname: z.hostname(), emoji: z.emoji(), base64: z.base64(), base64url: z.base64url(),
  nanoid: z.nanoid(), cuid: z.cuid(), cuid2: z.cuid2(), ulid: z.ulid(), xid: z.xid(), ksuid: z.ksuid(), ipv4: z.ipv4(), ipv6: z.ipv6(), cidrv4: z.cidrv4(), cidrv6: z.cidrv6(),
  e164: z.e164(), jwt: z.jwt(), hex: z.hex(), hash: z.hash("sha256"), date: z.iso.date(), time: z.iso.time(), datetime: z.iso.datetime(), duration: z.iso.duration(),
  offset: z.iso.datetime({ offset: true, local: true, precision: 3 }),
  template: z.templateLiteral(["v", z.number(), ".", z.enum(["a", "b"])]),
  number: z.number(), positive: z.number().positive().lt(100), int: z.int(), int32: z.int32(), uint32: z.uint32(), float32: z.float32(), float64: z.float64(), step: z.number().multipleOf(0.5), stepInt: z.int().multipleOf(5).min(5).max(50),
  boolean: z.boolean(), null: z.null(), any: z.any(), unknown: z.unknown(), literal: z.literal("x"), literals: z.literal(["a", 1, true, null]), enum: z.enum(["red", "green"]),
  stringbool: z.object({ a: z.string().optional(), b: z.string().nullable(), c: z.string().nullish(), d: z.string().default("x"), e: z.string().readonly(), f: z.string().describe("About f") }),
  array: z.array(z.string()).min(1).max(3), nonempty: z.array(z.int()).nonempty(), tuple: z.tuple([z.string(), z.int()]), tupleRest: z.tuple([z.string()]).rest(z.boolean()), emptyTuple: z.tuple([]),
  record: z.record(z.string(), z.int()), recordEnum: z.record(z.enum(["a", "b"]), z.int()), recordPartial: z.partialRecord(z.enum(["a", "b"]), z.int()), recordPattern: z.record(z.string().regex(/^k/), z.int()), recordEmail: z.record(z.email(), z.int()),
  object: z.object({ a: z.string() }), strict: z.strictObject({ a: z.string() }), loose: z.looseObject({ a: z.string() }), catchall: z.object({ a: z.string() }).catchall(z.int()), never: z.object({ a: z.never().optional(), b: z.int() }), empty: z.object({}),
  union: z.union([z.string(), z.int()]), xor: z.xor ? z.xor([z.object({ a: z.string() }), z.object({ b: z.int() })]) : z.null(), discriminated: z.discriminatedUnion("kind", [Cat, Dog]), nested: z.object({ pet: z.discriminatedUnion("kind", [Cat, Dog]) }),
  intersection: z.intersection(z.object({ a: z.string() }), z.object({ b: z.int() })), and: z.string().min(2).and(z.string().max(4)),
  recursive: Node, lazy: z.lazy(() => z.array(z.string())), json: z.json(), pipe: z.string().trim().toUpperCase(), brand: z.string().brand("B"), catch: z.int().catch(3), prefault: z.string().prefault("p"), file: z.object({ meta: z.string().meta({ title: "T", examples: ["e"] }) }),
  pick: z.object({ a: z.string(), b: z.int() }).partial(), extend: z.object({ a: z.string() }).extend({ b: z.int() }), nullableObject: z.object({ a: z.string() }).nullable(), optionalArray: z.object({ a: z.array(z.string()).optional() }),
};
for (const [io, target] of [["output", "draft-2020-12"], ["input", "draft-7"], ["output", "openapi-3.0"]]) {
  const made = {};
  for (const [name, schema] of Object.entries(page)) {
    try { made[name] = z.toJSONSchema(schema, { io, target, unrepresentable: "throw" }); } catch (e) { console.error(target, name, String(e).slice(0, 100)); }
  }
  const lines = Object.entries(made).map(([name, schema]) => `${JSON.stringify(name)}: ${JSON.stringify(schema)}`);
  writeFileSync(`${process.argv[2]}/zod-${target}.json`, `{\n${lines.join(",\n")}\n}\n`);
}
