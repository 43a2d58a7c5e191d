// Sums over the processes of one machine that share a model, through memory that all of them map.
//
// Every process writes its numbers into its own box, then adds all boxes in rank order, so all processes get the same bits.
// A box holds two messages, which alternate. Before a process overwrites message n with message n + 2, it has seen that all
// others have written message n + 1, so they have finished reading message n.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "pool.h"

#if defined(__linux__)
#include <cerrno>
#include <csignal>
#include <ctime>
#endif

namespace paceline {

// A rank's view of the boxes. `memory` must initially be zero.
struct Exchange {
    static constexpr int64_t MESSAGE = 1 << 16;  // numbers in a message

    struct alignas(64) Box {
        std::atomic<uint64_t> written;  // messages
        std::atomic<int64_t> process;
    };

    uint8_t* memory;
    int32_t rank, ranks;

    static int64_t bytes(int ranks) { return ranks * int64_t(sizeof(Box) + 2 * MESSAGE * sizeof(float)); }

    // Registers this process, so that the others notice when it ends. All ranks must join before the first sum.
    void join() const { box(rank).process.store(process()); }

    // Tells the other ranks, which may be waiting, that this process will not take part in further sums.
    void leave() const { box(rank).process.store(LEFT); }

    // Adds the other ranks' numbers to x [n]. Returns false if a rank has ended or left.
    bool sum(float* x, int64_t n) const {
        for (int64_t at = 0; at < n; at += MESSAGE)
            if (!message(x + at, std::min(MESSAGE, n - at))) return false;
        return true;
    }

   private:
    Box& box(int r) const { return reinterpret_cast<Box*>(memory)[r]; }

    float* message_memory(int r, uint64_t turn) const {
        return reinterpret_cast<float*>(memory + ranks * sizeof(Box)) + (2 * r + int64_t(turn & 1)) * MESSAGE;
    }

    bool message(float* x, int64_t n) const {
        const uint64_t turn = box(rank).written.load(std::memory_order_relaxed);
        std::copy_n(x, n, message_memory(rank, turn));
        box(rank).written.store(turn + 1, std::memory_order_release);
        for (int r = 0; r < ranks; r++) {
            if (!await(box(r), turn + 1)) return false;
            const float* y = message_memory(r, turn);
            if (r == 0)
                std::copy_n(y, n, x);
            else
                for (int64_t i = 0; i < n; i++) x[i] += y[i];
        }
        return true;
    }

    // Spins for the usual time of an exchange between running processes, then yields, then sleeps.
    static bool await(const Box& of, uint64_t count) {
        for (int64_t tries = 0; of.written.load(std::memory_order_acquire) < count; tries++) {
            if (tries < SPINS) continue;
            if (tries < SPINS + YIELDS)
                std::this_thread::yield();
            else if (!pause(of, tries))
                return of.written.load(std::memory_order_acquire) >= count;  // the rank may have written before it left
        }
        return true;
    }

    static constexpr int64_t SPINS = 20000, YIELDS = 200, LEFT = -1;

#if defined(__linux__)
    static int64_t process() { return getpid(); }

    // Pauses. Returns false if the other process has ended or left.
    static bool pause(const Box& of, int64_t tries) {
        const timespec time{0, 20000};
        nanosleep(&time, nullptr);
        const int64_t other = of.process.load();
        if (other == LEFT) return false;
        return tries % 1024 || !other || kill(pid_t(other), 0) == 0 || errno != ESRCH;
    }
#else
    static int64_t process() { return 0; }
    static bool pause(const Box&, int64_t) { return false; }
#endif
};

}  // namespace paceline
