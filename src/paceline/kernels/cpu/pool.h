// Threads that share the pieces of a stage of work.
//
// The calling thread leads: it publishes a stage of `count` pieces, and it and the pool's threads take pieces until none is
// left. A thread touches nothing of a stage before it has taken a piece. So the leader waits for pieces, never for threads: a
// suspended thread delays a stage only while it holds a piece, and a sleeping thread delays nothing. The result does not
// depend on which thread takes a piece.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <thread>

#if defined(__linux__)
#include <climits>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#if !defined(_WIN32)
#include <unistd.h>
#endif
#endif

namespace paceline {

// The range `from` to `to` - 1.
struct Range {
    int from, to;
};

// Part `index` of the range 0 to n - 1, cut into `count` parts.
inline Range nth_part(int index, int count, int64_t n) { return {int(n * index / count), int(n * (index + 1) / count)}; }

// A 32-bit number. Threads can sleep until it changes.
class Signal {
   public:
    std::atomic<uint32_t> value{0};

    // Sleeps until the value differs from `old`. May return early.
    void sleep(uint32_t old) {
        sleepers_.fetch_add(1);
#if defined(__linux__)
        syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
        std::unique_lock<std::mutex> hold(lock_);
        changed_.wait(hold, [&] { return value.load() != old; });
#endif
        sleepers_.fetch_sub(1);
    }

    // Wakes all sleepers. Call it after changing the value.
    void wake() {
        if (!sleepers_.load()) return;
#if defined(__linux__)
        syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
        { std::lock_guard<std::mutex> hold(lock_); }
        changed_.notify_all();
#endif
    }

    // Spins for about 0.1 ms, the duration of most stages, then sleeps. Waking a thread takes longer than most stages.
    void wait(uint32_t old) {
        for (int i = 0; i < SPINS; i++, relax())
            if (value.load(std::memory_order_acquire) != old) return;
        while (value.load() == old) sleep(old);
    }

   private:
    static constexpr int SPINS = 5000;

    static void relax() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb");  // `yield` returns at once on most processors
#endif
    }

    std::atomic<int> sleepers_{0};
#if !defined(__linux__)
    std::mutex lock_;
    std::condition_variable changed_;
#endif
};

inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Chooses the number of threads. On a busy machine fewer threads can be faster, because the leader waits for pieces that a
// suspended thread holds. If waits are long, fewer threads are tried for a few passes. While the count is below the maximum,
// more threads are tried now and then. On an idle machine there are no trials. Each model has its own count: a draft model's
// small stages wait relatively longer than the target's, so a trial for one would slow down the other.
class ThreadCount {
   public:
    int choose(int most) {
        if (most != most_) *this = ThreadCount(most);
        return trial_ ? trial_ : count_;
    }

    // Records a pass of `size` rows. The leader waited for `waited` of its `seconds`.
    void passed(int64_t size, double seconds, double waited) {
        const double now = seconds_now();
        if (size != size_) {  // passes of different sizes are not comparable, but sizes may alternate
            if (now - seen_ > 0.2) size_ = size, seen_ = now, mean_ = seconds, waits_ = waited / seconds, trial_ = 0;
            return;
        }
        seen_ = now;
        if (trial_) return tried(seconds, now);
        mean_ += (seconds - mean_) / 4, waits_ += (waited / seconds - waits_) / 4;
        if (now - since_ < pause_) return;
        if (count_ > 1 && waits_ > LONG)
            trial_ = count_ - std::max(1, count_ / 4);
        else if (count_ < most_)
            trial_ = std::min(most_, 2 * count_);
        passes_ = 0, total_ = 0;
    }

   private:
    static constexpr double LONG = 0.25, SHORTEST = 0.1, LONGEST = 1;  // fraction of a pass; seconds between trials

    explicit ThreadCount(int most) : most_(most), count_(most) {}

    void tried(double seconds, double now) {
        passes_++, total_ += seconds;
        if (passes_ < 4 && total_ < 1.5 * mean_ * passes_) return;
        if (total_ < 0.95 * mean_ * passes_)
            count_ = trial_, mean_ = total_ / passes_, waits_ = 0, pause_ = SHORTEST;
        else
            pause_ = std::min(2 * pause_, LONGEST);
        trial_ = 0, since_ = now;
    }

    int most_ = 0, count_ = 0, trial_ = 0, passes_ = 0;
    int64_t size_ = 0;
    double mean_ = 0, waits_ = 0, total_ = 0, seen_ = 0, since_ = 0, pause_ = SHORTEST;

   public:
    ThreadCount() = default;
};

// The threads of this process, started when they are first needed. The pool is never destroyed, since its threads may outlive
// `main`.
class Pool {
   public:
    static Pool& instance() {
        static std::atomic<Pool*> current{nullptr};
        Pool* pool = current.load();
        // The child of a fork has no threads, and its copy of a lock may be held for ever.
        while (!pool || pool->process_ != process()) {
            Pool* fresh = new Pool;
            if (current.compare_exchange_strong(pool, fresh)) return *fresh;
            delete fresh;
        }
        return *pool;
    }

    // The thread count of the model that `work` identifies. If `work` is null, the thread count of the previous call: an output head runs
    // right after its model's layers. Only the owner may call this.
    ThreadCount& chosen(const void* work) {
        for (int i = 0; work && works_[last_] != work && i < COUNTS; i++) last_ = (last_ + 1) % COUNTS;
        if (work && works_[last_] != work) last_ = (last_ + 1) % COUNTS, works_[last_] = work, chosen_[last_] = {};
        return chosen_[last_];
    }

    // Makes the caller the owner of the threads. Returns false if another caller owns them.
    bool acquire() { return !owned_.test_and_set(std::memory_order_acquire); }
    void release() { owned_.clear(std::memory_order_release); }

    // Lets up to `threads` threads work, including the owner's. Returns the number of threads that it got.
    int limit(int threads) {
        threads = std::min(threads, MOST);
        try {
            for (; started_ < threads; started_++) std::thread(&Pool::help, this, started_).detach();
        } catch (const std::exception&) {  // the system allows no further thread: use the ones that started
        }
        threads = std::min(threads, started_);
        if (helping_.value.exchange(threads) < uint32_t(threads)) helping_.wake();
        return threads;
    }

    // Runs call(context, piece, thread) for pieces 0 to count - 1. Returns the seconds that the owner waited for other threads.
    double run(int count, void (*call)(void*, int, int), void* context) {
        call_ = call, context_ = context;
        left_.value.store(count);
        open_.store(uint64_t(++stage_) << 32 | uint64_t(count) << 16);
        published_.value.store(stage_);
        published_.wake();
        while (take(0)) {}
        uint32_t left = left_.value.load();
        if (!left) return 0;
        const double began = seconds_now();
        for (; left; left = left_.value.load()) left_.wait(left);
        return seconds_now() - began;
    }

    static constexpr int MOST = 256, PIECES = (1 << 16) - 1;  // threads; pieces per stage

   private:
    static constexpr int COUNTS = 8;  // models whose counts are remembered

    static int64_t process() {
#if defined(_WIN32)
        return 0;
#else
        return getpid();
#endif
    }

    void help(int thread) {
        for (;;) {
            const uint32_t helping = helping_.value.load(), stage = published_.value.load();
            if (uint32_t(thread) >= helping) {
                helping_.wait(helping);
                continue;
            }
            while (take(thread)) {}
            published_.wait(stage);
        }
    }

    // Takes and runs a piece. Returns false if none is left.
    bool take(int thread) {
        uint64_t now = open_.load();
        do {
            // Read the limit after the stage: it is set before the stage is published.
            if ((now & 0xffff) == (now >> 16 & 0xffff) || uint32_t(thread) >= helping_.value.load()) return false;
        } while (!open_.compare_exchange_weak(now, now + 1));
        call_(context_, int(now & 0xffff), thread);
        if (left_.value.fetch_sub(1) == 1) left_.wake();
        return true;
    }

    alignas(64) std::atomic<uint64_t> open_{0};  // stage number, pieces, next piece: 32, 16 and 16 bits
    alignas(64) Signal left_;                    // unfinished pieces
    alignas(64) Signal published_;               // number of the last stage
    Signal helping_;                             // number of threads that may take pieces, the owner included
    void (*call_)(void*, int, int) = nullptr;
    void* context_ = nullptr;
    uint32_t stage_ = 0;
    int started_ = 1;
    std::atomic_flag owned_ = ATOMIC_FLAG_INIT;
    const void* works_[COUNTS] = {};
    ThreadCount chosen_[COUNTS];
    int last_ = 0;
    const int64_t process_ = process();
};

// The threads of one call into the library: the pool's threads, or only the calling thread.
class Team {
   public:
    Team() = default;  // only the calling thread

    // `work` identifies the model, so that `passed` can update its thread count.
    explicit Team(int threads, const void* work = nullptr) : work_(work) {
        if (threads < 2 || !(pool_ = &Pool::instance())->acquire()) pool_ = nullptr;
        if (pool_) began_ = seconds_now(), count_ = pool_->limit(pool_->chosen(work).choose(threads));
    }

    Team(const Team&) = delete;

    ~Team() {
        if (pool_) pool_->release();
    }

    // Records a pass of `size` rows for later choices of the thread count.
    void passed(int64_t size) {
        if (pool_) pool_->chosen(work_).passed(size, seconds_now() - began_, waited_);
    }

    int count() const { return count_; }

    // Number of pieces for a stage of `n` indivisible steps: several per thread, so that a slow thread delays the others little.
    int pieces(int n) const { return count_ == 1 ? 1 : std::min(n, 4 * count_); }

    // Calls work(piece, thread) for all pieces. Returns when all are finished.
    template <class Work>
    void run(int pieces, Work work) {
        if (count_ == 1 || pieces == 1) {
            for (int piece = 0; piece < pieces; piece++) work(piece, 0);
            return;
        }
        auto call = [](void* context, int piece, int thread) { (*static_cast<Work*>(context))(piece, thread); };
        waited_ += pool_->run(pieces, call, &work);
    }

    // Calls work(range, thread) for parts of the range 0 to n - 1.
    template <class Work>
    void split(int n, Work work) {
        const int count = pieces(n);
        run(count, [&](int piece, int thread) { work(nth_part(piece, count, n), thread); });
    }

   private:
    Pool* pool_ = nullptr;
    const void* work_ = nullptr;
    int count_ = 1;
    double waited_ = 0, began_ = 0;
};

}  // namespace paceline
