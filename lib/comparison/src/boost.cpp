// Boost.Interprocess and Boost.Lockfree behind a C interface: no exception leaves it, and each call waits by itself.

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

#include <sys/mman.h>

#include <boost/interprocess/ipc/message_queue.hpp>
#include <boost/interprocess/managed_shared_memory.hpp>
#include <boost/lockfree/queue.hpp>
#include <boost/lockfree/spsc_queue.hpp>

namespace interprocess = boost::interprocess;
namespace lockfree = boost::lockfree;

namespace {

thread_local std::string last_error;

struct Queue {
    virtual ~Queue() = default;
    virtual void send(const void *message) = 0;
    virtual void receive(void *message) = 0;
    // Takes all page faults of the calling process now.
    virtual void prefault() {}
};

template <std::size_t Bytes> struct Message {
    std::array<std::uint64_t, Bytes / 8> words;
};

// A lock-free ring inside a managed segment; both sides poll.
template <typename T, typename Ring> class Polled final : public Queue {
    interprocess::managed_shared_memory segment;
    Ring *ring;

public:
    explicit Polled(const char *name)
        : segment(interprocess::create_only, name, sizeof(Ring) + 65536), ring(segment.construct<Ring>("ring")()) {}

    void send(const void *message) override {
        while (!ring->push(*static_cast<const T *>(message))) {
        }
    }

    void receive(void *message) override {
        while (!ring->pop(*static_cast<T *>(message))) {
        }
    }

    void prefault() override {
        if (madvise(segment.get_address(), segment.get_size(), MADV_POPULATE_WRITE) != 0) {
            throw std::runtime_error("prefaulting shared memory (needs Linux 5.14)");
        }
    }
};

template <std::size_t Bytes, std::size_t Depth>
using Spsc = Polled<Message<Bytes>, lockfree::spsc_queue<Message<Bytes>, lockfree::capacity<Depth>>>;

template <std::size_t Bytes, std::size_t Depth>
using Mpmc = Polled<Message<Bytes>,
                    lockfree::queue<Message<Bytes>, lockfree::fixed_sized<true>, lockfree::capacity<Depth>>>;

// The message queue with its lock and conditions; `Poll` never sleeps in it.
template <bool Poll> class Locked final : public Queue {
    interprocess::message_queue queue;
    std::size_t bytes;

public:
    Locked(const char *name, std::size_t depth, std::size_t bytes)
        : queue(interprocess::create_only, name, depth, bytes), bytes(bytes) {}

    void send(const void *message) override {
        if constexpr (Poll) {
            while (!queue.try_send(message, bytes, 0)) {
            }
        } else {
            queue.send(message, bytes, 0);
        }
    }

    void receive(void *message) override {
        std::size_t received = 0;
        unsigned priority = 0;
        if constexpr (Poll) {
            while (!queue.try_receive(message, bytes, received, priority)) {
            }
        } else {
            queue.receive(message, bytes, received, priority);
        }
        if (received != bytes) {
            throw std::runtime_error("a message of another length");
        }
    }
};

// Calls `work`, and keeps the text of what it throws for `boost_error`.
template <typename Work> bool tried(Work work) {
    try {
        work();
        return true;
    } catch (const std::exception &error) {
        last_error = error.what();
        return false;
    }
}

Queue *made(const std::string &kind, std::size_t bytes, const char *name) {
    if (kind == "spsc") {
        return bytes == 64 ? static_cast<Queue *>(new Spsc<64, 1024>(name)) : new Spsc<65536, 16>(name);
    }
    if (kind == "mpmc" && bytes == 64) {
        return new Mpmc<64, 1024>(name);
    }
    const std::size_t depth = bytes == 64 ? 1024 : 16;
    if (kind == "locked") {
        return new Locked<false>(name, depth, bytes);
    }
    if (kind == "locked-poll") {
        return new Locked<true>(name, depth, bytes);
    }
    throw std::invalid_argument("no queue of the kind " + kind + " for this size");
}

} // namespace

extern "C" {

// A new queue under `name`, or null; see `boost_error`.
Queue *boost_queue_new(const char *kind, std::size_t bytes, const char *name) {
    Queue *queue = nullptr;
    tried([&] { queue = made(kind, bytes, name); });
    return queue;
}

void boost_queue_delete(Queue *queue) { delete queue; }

bool boost_queue_prefault(Queue *queue) {
    return tried([&] { queue->prefault(); });
}

bool boost_queue_send(Queue *queue, const void *message) {
    return tried([&] { queue->send(message); });
}

bool boost_queue_receive(Queue *queue, void *message) {
    return tried([&] { queue->receive(message); });
}

const char *boost_error() { return last_error.c_str(); }
}
