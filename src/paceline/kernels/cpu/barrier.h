// A barrier for threads that share a piece of work, and the share of each.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace paceline {

// OpenMP's own barrier puts a thread to sleep at once if a program has more threads than cores, even if most of them are
// idle (as a server's are). Waking up takes longer than a stage of a layer, of which a pass has hundreds, so threads spin
// here for as long as most stages take, and sleep only then.
class Barrier {
   public:
    // Waits for `count` threads, the same ones each time.
    void wait(int count) {
        const uint32_t now = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1) + 1 == count) {
            arrived_.store(0);
            round_.store(now + 1);
            if (sleepers_.load()) wake();
            return;
        }
        for (int i = 0; i < SPINS; i++, relax())
            if (round_.load(std::memory_order_acquire) != now) return;
        sleepers_.fetch_add(1);
        while (round_.load() == now) sleep(now);
        sleepers_.fetch_sub(1);
    }

   private:
    static constexpr int SPINS = 5000;  // some 0.1 ms

    std::atomic<int> arrived_{0}, sleepers_{0};
    std::atomic<uint32_t> round_{0};

    static void relax() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb");  // `yield` takes no time on most
#endif
    }

#if defined(__linux__)
    void sleep(uint32_t now) { syscall(SYS_futex, &round_, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &round_, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { std::this_thread::yield(); }
    void wake() {}
#endif
};

// A thread's part of 0..n, in whole units.
struct Span {
    int from, to;
};

// One of `count` threads that work on the same rows.
struct Thread {
    int index, count;
    Barrier* barrier;

    Span share(int n, int unit = 1) const {
        int units = (n + unit - 1) / unit;
        return {std::min(n, units * index / count * unit), std::min(n, units * (index + 1) / count * unit)};
    }

    void wait() const {
        if (count > 1) barrier->wait(count);
    }
};

// Whether the compiler has parallel regions; Apple's has not.
#if defined(_OPENMP)
constexpr bool PARALLEL = true;
inline Thread this_thread(Barrier& barrier) { return {omp_get_thread_num(), omp_get_num_threads(), &barrier}; }
#else
constexpr bool PARALLEL = false;
inline Thread this_thread(Barrier& barrier) { return {0, 1, &barrier}; }
#endif

}  // namespace paceline
