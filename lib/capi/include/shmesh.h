/*
 * shmesh: shared-memory links between the processes of one machine, for C and C++.
 *
 * The primary creates a link, secondaries attach to it. A sender loans a buffer, writes the message in place and sends it; a receiver
 * receives the message, reads it in place and releases it. Functions return SHMESH_OK or an error code; shmesh_last_error()
 * describes the error.
 *
 * A handle is for one thread at a time. Strings are UTF-8. Generated from lib/capi/src by cbindgen.
 */

#ifndef SHMESH_H
#define SHMESH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * The result of a call: 0 is success, any other value is the reason of the failure. Numbers never change.
 */
typedef enum {
    /**
     * The call has succeeded.
     */
    SHMESH_OK = 0,
    /**
     * There is no message, signal or event to take.
     */
    SHMESH_ERROR_EMPTY = 1,
    /**
     * The call timed out.
     */
    SHMESH_ERROR_TIMEOUT = 2,
    /**
     * No buffer of the pool is free. Retry after some were released.
     */
    SHMESH_ERROR_EXHAUSTED = 3,
    /**
     * The ring is full. Retry after the receiver has taken messages.
     */
    SHMESH_ERROR_FULL = 4,
    /**
     * Invalid argument: a pointer is NULL, a string is not UTF-8, or a number is out of range.
     */
    SHMESH_ERROR_ARGUMENT = 5,
    /**
     * The object is not valid: the handle was closed, the configuration freed, the loan sent or dropped, the message
     * released; or the pointer was never valid.
     */
    SHMESH_ERROR_ENDED = 6,
    /**
     * Another thread is in a call with this handle. Use one handle per thread, from `shmesh_link_clone`.
     */
    SHMESH_ERROR_BUSY = 7,
    /**
     * The handle still has loans that were not sent or dropped, or messages that were not released.
     */
    SHMESH_ERROR_HELD = 8,
    /**
     * The length is larger than the buffer.
     */
    SHMESH_ERROR_TOO_LONG = 9,
    /**
     * The link does not have this pool, or the pool cannot hold a DATA part.
     */
    SHMESH_ERROR_NO_POOL = 10,
    /**
     * The configuration is invalid.
     */
    SHMESH_ERROR_CONFIG = 11,
    /**
     * The link or the IPC directory does not exist.
     */
    SHMESH_ERROR_NOT_FOUND = 12,
    /**
     * The side, its role on a ring, or every seat is taken, or `fresh` was set while another participant is attached.
     */
    SHMESH_ERROR_TAKEN = 13,
    /**
     * The link exists with a different configuration.
     */
    SHMESH_ERROR_DIFFERS = 14,
    /**
     * The files are damaged, of another version, or not a link of shmesh.
     */
    SHMESH_ERROR_DAMAGED = 15,
    /**
     * There is not enough memory.
     */
    SHMESH_ERROR_NO_SPACE = 16,
    /**
     * This user does not have permission.
     */
    SHMESH_ERROR_PERMISSION = 17,
    /**
     * This participant was evicted. Close the handle and attach again.
     */
    SHMESH_ERROR_EVICTED = 18,
    /**
     * A peer wrote invalid data into shared memory. Further messages can be received.
     */
    SHMESH_ERROR_CORRUPT = 19,
    /**
     * The link was created without notification.
     */
    SHMESH_ERROR_NO_NOTIFICATION = 20,
    /**
     * A system call failed, or the host of the link refused a request.
     */
    SHMESH_ERROR_SYSTEM = 21,
    /**
     * Internal error of this library.
     */
    SHMESH_ERROR_INTERNAL = 22,
    /**
     * The process that had taken the request ended before its last reply.
     */
    SHMESH_ERROR_PEER_GONE = 23,
    /**
     * The server dropped the request without a last reply.
     */
    SHMESH_ERROR_UNANSWERED = 24,
    /**
     * The client does not wait for the reply any more.
     */
    SHMESH_ERROR_UNWANTED = 25,
} shmesh_error_t;

/**
 * The kinds of events of other participants.
 */
typedef enum {
    /**
     * The participant attached, or was already attached when this handle attached.
     */
    SHMESH_EVENT_ATTACHED = 1,
    /**
     * The participant closed its handle.
     */
    SHMESH_EVENT_DETACHED = 2,
    /**
     * The process ended without closing its handle, and its buffers were recovered.
     */
    SHMESH_EVENT_DIED = 3,
    /**
     * The participant was evicted while its process was alive. No further event follows for it.
     */
    SHMESH_EVENT_EVICTED = 4,
    /**
     * `missed` participants attached and ended between two calls and are not reported; the other members are 0.
     */
    SHMESH_EVENT_MISSED = 5,
    /**
     * `missed` messages of the other side were lost between nodes; `shmesh_link_lost` counts them, too. The event is there before the
     * first message after them. The other members are 0.
     */
    SHMESH_EVENT_LOST = 6,
} shmesh_event_kind_t;

/**
 * The two sides of a link.
 */
typedef enum {
    /**
     * The side that creates the link.
     */
    SHMESH_PRIMARY = 0,
    /**
     * The side that attaches to the link.
     */
    SHMESH_SECONDARY = 1,
} shmesh_side_t;

/**
 * The buffer pools of a link.
 */
typedef enum {
    /**
     * No pool: the message has no DATA part.
     */
    SHMESH_NO_DATA = -1,
    /**
     * Buffers for MSG parts.
     */
    SHMESH_CPU_MSG = 0,
    /**
     * Buffers for DATA parts.
     */
    SHMESH_CPU_DATA = 1,
    /**
     * Buffers for large DATA parts.
     */
    SHMESH_CPU_LARGE = 2,
    /**
     * Buffers in device memory. This interface has no addresses for them: they cannot be loaned, and `data` of received
     * messages is NULL.
     */
    SHMESH_CUDA_DATA = 3,
    /**
     * A second pool of buffers in device memory.
     */
    SHMESH_GPU_DATA = 4,
} shmesh_pool_t;

/**
 * A configuration: a list of links. Free it with `shmesh_config_free`. A handle is the key of a table and is never
 * dereferenced: a freed one names an empty configuration.
 */
typedef struct shmesh_config_t shmesh_config_t;

/**
 * A handle of a link, for one thread at a time. Other threads use their own handles, from `shmesh_link_clone`; a forked child
 * attaches again. The handle is never dereferenced: a call with a closed handle returns ENDED.
 */
typedef struct shmesh_link_t shmesh_link_t;

/**
 * Options for creating a link or attaching to one. All zero is the default.
 */
typedef struct {
    /**
     * The IPC directory. NULL: the value of `SHMESH_DIR`, or `/dev/shm` if that is not set.
     */
    const char *dir;
    /**
     * How long attaching waits for the link to exist, in nanoseconds.
     */
    uint64_t timeout_ns;
    /**
     * Attach without mapping all pages in advance.
     */
    bool no_prefault;
    /**
     * Allow several processes on the primary side.
     */
    bool allow_second_primary;
    /**
     * Empty a link that already exists: messages and posts of an earlier run are dropped. Creating fails with TAKEN while any
     * other participant is attached.
     */
    bool fresh;
} shmesh_options_t;

/**
 * An event of another participant. Each handle is one participant.
 */
typedef struct {
    /**
     * A `shmesh_event_kind_t`. Later versions may add kinds.
     */
    int kind;
    /**
     * A `shmesh_side_t`: the side of the participant.
     */
    int side;
    /**
     * The seat of the participant, as `shmesh ls` shows it. Seats are reused.
     */
    uint32_t seat;
    /**
     * The process id of the participant in its own pid namespace.
     */
    uint32_t pid;
    /**
     * SHMESH_EVENT_MISSED: the number of missed participants. SHMESH_EVENT_LOST: the number of lost messages, at most UINT32_MAX.
     */
    uint32_t missed;
} shmesh_event_t;

/**
 * A message that is being written, in buffers of its own. End it once, with `shmesh_loan_send` or `shmesh_loan_drop`. A copy of
 * the structure is the same loan and ends with it.
 */
typedef struct {
    /**
     * Pointer to the MSG part.
     */
    void *msg;
    /**
     * Capacity of `msg` in bytes.
     */
    size_t msg_size;
    /**
     * Pointer to the DATA part; NULL if there is none.
     */
    void *data;
    /**
     * Capacity of `data` in bytes.
     */
    size_t data_size;
    /**
     * Private: do not use.
     */
    uint64_t private_words[2];
    /**
     * Private: the handle, or NULL after the loan has ended.
     */
    const shmesh_link_t *private_link;
} shmesh_loan_t;

/**
 * A received message. It holds its buffers until it is released, once, with `shmesh_message_release`. A copy of the structure is
 * the same message and ends with it.
 */
typedef struct {
    /**
     * An id that the sender chose.
     */
    int32_t msg_id;
    /**
     * The id of a radio cell, or any other number that the sender chose.
     */
    int32_t cell_id;
    /**
     * Pointer to the MSG part.
     */
    const void *msg;
    /**
     * Length of `msg` in bytes.
     */
    size_t msg_len;
    /**
     * Pointer to the DATA part; NULL if there is none, or if it is in device memory.
     */
    const void *data;
    /**
     * Length of `data` in bytes.
     */
    size_t data_len;
    /**
     * A `shmesh_pool_t`: the pool of the DATA part, or SHMESH_NO_DATA.
     */
    int data_pool;
    /**
     * Private: do not use.
     */
    uint64_t private_words[2];
    /**
     * Private: the handle, or NULL after the message was released.
     */
    const shmesh_link_t *private_link;
} shmesh_message_t;

/**
 * A pending request of a client. End it once, with `shmesh_pending_drop`, even after its last reply. A copy of the
 * structure is the same request and ends with it.
 */
typedef struct {
    /**
     * Private: do not use.
     */
    uint64_t private_words[2];
    /**
     * Private: the handle, or NULL after the request has ended.
     */
    const shmesh_link_t *private_link;
} shmesh_pending_t;

/**
 * A request that a server received. End it once, with `shmesh_request_release`. A copy of the structure is the same
 * request and ends with it.
 */
typedef struct {
    /**
     * The client's message. It is valid until the request is released, and must not be released itself.
     */
    shmesh_message_t message;
    /**
     * The seat of the client.
     */
    uint8_t client;
    /**
     * Private: do not use.
     */
    uint64_t private_words[2];
    /**
     * Private: the handle, or NULL after the request was released.
     */
    const shmesh_link_t *private_link;
} shmesh_request_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * A short text for an error code, valid for the life of the process. Never NULL, even for unknown codes.
 */
const char *shmesh_error_string(int error);

/**
 * Describes the last failed call of this thread: the link, the limit and the remedy. Never NULL; valid until the next call
 * of this thread that fails. EMPTY and TIMEOUT do not change it.
 */
const char *shmesh_last_error(void);

/**
 * Reads a configuration from a YAML string, in shmesh's form (`links:`) or NVIPC's (`transport:`).
 */
shmesh_error_t shmesh_config_from_yaml(const char *yaml, shmesh_config_t **config);

/**
 * Reads a configuration from a YAML file.
 */
shmesh_error_t shmesh_config_from_file(const char *path, shmesh_config_t **config);

/**
 * The default configuration of a link: cpu_msg with 1024 buffers of 8 KiB, cpu_data with 256 of 64 KiB, no other pool.
 */
shmesh_error_t shmesh_config_default(const char *name, shmesh_config_t **config);

/**
 * The number of links in a configuration; 0 for NULL and for a freed configuration.
 */
size_t shmesh_config_count(const shmesh_config_t *config);

/**
 * The name of a link of a configuration, valid for the life of the process. NULL if the index is out of range.
 */
const char *shmesh_config_name(const shmesh_config_t *config, size_t index);

/**
 * Frees a configuration. Does nothing for NULL and for a configuration that was freed before.
 */
void shmesh_config_free(shmesh_config_t *config);

/**
 * Creates the link with this index in a configuration, and attaches as its primary. If the link exists and its primary has
 * ended, attaches to it; queued messages are kept unless `fresh` is set. `options` may be NULL.
 */
shmesh_error_t shmesh_link_create(const shmesh_config_t *config,
                                  size_t index,
                                  const shmesh_options_t *options,
                                  shmesh_link_t **link);

/**
 * Attaches to an existing link. `side` is a `shmesh_side_t`; `options` may be NULL.
 */
shmesh_error_t shmesh_link_attach(const char *name, int side, const shmesh_options_t *options, shmesh_link_t **link);

/**
 * Creates another handle on the same side, for another thread.
 */
shmesh_error_t shmesh_link_clone(const shmesh_link_t *link, shmesh_link_t **clone);

/**
 * Detaches from the link and closes the handle. Returns HELD, and does not close the handle, while it has loans or messages.
 * Does nothing for NULL.
 */
shmesh_error_t shmesh_link_close(shmesh_link_t *link);

/**
 * The name of the link, valid for the life of the process. NULL for NULL and for a closed handle.
 */
const char *shmesh_link_name(const shmesh_link_t *link);

/**
 * Whether this handle created the link. `false` if the link existed: an earlier run, a sidecar or another process created it.
 */
shmesh_error_t shmesh_link_was_created(const shmesh_link_t *link,
                                       bool *was_created);

/**
 * The size of a buffer of `pool` in bytes, and the number of buffers. `pool` is a `shmesh_pool_t`. Returns NO_POOL if the link
 * does not have the pool.
 */
shmesh_error_t shmesh_link_pool(const shmesh_link_t *link,
                                int pool,
                                uint32_t *buf_size,
                                uint32_t *pool_len);

/**
 * Reports to the receivers of the other side that so many messages for them were lost before they reached the link, for programs that
 * forward messages of others. They are in `shmesh_link_lost` before a message that is sent later can be received.
 */
shmesh_error_t shmesh_link_report_lost(const shmesh_link_t *link,
                                       uint64_t messages);

/**
 * The number of messages that this handle did not get: the writer of a broadcast ring overtook it, or they were lost between nodes
 * (`SHMESH_EVENT_LOST`). Those are counted before the first message after them can be received.
 */
shmesh_error_t shmesh_link_lost(const shmesh_link_t *link,
                                uint64_t *lost);

/**
 * The number of readers that receive the messages of this broadcast ring's writer; 0 on other links.
 */
shmesh_error_t shmesh_link_readers(const shmesh_link_t *link, size_t *readers);

/**
 * Waits until this broadcast ring has `count` readers, with a timeout as in `shmesh_link_wait`: for a writer that must not send
 * before all readers are attached.
 */
shmesh_error_t shmesh_link_wait_for_readers(const shmesh_link_t *link,
                                            size_t count,
                                            int64_t timeout_ns);

/**
 * The number of messages that are queued for this side; it may change at any time.
 */
shmesh_error_t shmesh_link_queued(const shmesh_link_t *link, size_t *queued);

/**
 * Recovers the buffers of participants that have died. Attaching does the same.
 */
shmesh_error_t shmesh_link_recover(const shmesh_link_t *link);

/**
 * Wakes the receivers of the other side that sleep or use the descriptor. One call after several messages suffices.
 */
shmesh_error_t shmesh_link_notify(const shmesh_link_t *link);

/**
 * Waits for a message, at most `timeout_ns` nanoseconds; negative: without a limit.
 */
shmesh_error_t shmesh_link_wait(const shmesh_link_t *link, int64_t timeout_ns);

/**
 * Posts the semaphore of the other side once, and wakes it. Posts add up.
 */
shmesh_error_t shmesh_link_post(const shmesh_link_t *link);

/**
 * Waits for a post of the other side and takes it, with a timeout as in `shmesh_link_wait`.
 */
shmesh_error_t shmesh_link_wait_post(const shmesh_link_t *link, int64_t timeout_ns);

/**
 * A descriptor for select, poll and epoll, readable after each notification, post and event from now on. Receive once after
 * this call, because earlier messages do not make it readable; take its signals with `shmesh_link_take_signal`. It belongs to
 * the handle: do not close it.
 */
shmesh_error_t shmesh_link_fd(const shmesh_link_t *link,
                              int *fd);

/**
 * Takes one signal from the descriptor. Returns EMPTY if there is none. Never blocks.
 */
shmesh_error_t shmesh_link_take_signal(const shmesh_link_t *link);

/**
 * Takes the next event of another participant; EMPTY if there is none. Never blocks.
 *
 * The first events report the participants that were attached before this handle. From then on each participant is reported
 * once as attached, and once as detached, died or evicted. The descriptor of `shmesh_link_fd` becomes readable after an
 * event: take its signals, then messages and events until there are none.
 */
shmesh_error_t shmesh_link_next_event(const shmesh_link_t *link,
                                      shmesh_event_t *event);

/**
 * Waits for an event, at most `timeout_ns` nanoseconds; negative: without a limit. Messages do not end the wait.
 */
shmesh_error_t shmesh_link_wait_event(const shmesh_link_t *link, int64_t timeout_ns);

/**
 * Loans a MSG buffer and a DATA buffer of `pool`, a `shmesh_pool_t`; SHMESH_NO_DATA for no DATA part. Never blocks. The bytes
 * are undefined: a previous user may have written them.
 */
shmesh_error_t shmesh_link_loan(const shmesh_link_t *link,
                                int pool,
                                shmesh_loan_t *loan);

/**
 * Sends the first `msg_len` and `data_len` bytes of a loan. After success the loan has ended. After a failure it can be sent
 * again or dropped, except after EVICTED.
 */
shmesh_error_t shmesh_loan_send(shmesh_loan_t *loan,
                                int32_t msg_id,
                                int32_t cell_id,
                                size_t msg_len,
                                size_t data_len);

/**
 * Drops a loan without sending it, and frees its buffers.
 */
shmesh_error_t shmesh_loan_drop(shmesh_loan_t *loan);

/**
 * Sends up to 112 bytes in the ring itself, without a buffer.
 */
shmesh_error_t shmesh_link_send_inline(const shmesh_link_t *link,
                                       int32_t msg_id,
                                       int32_t cell_id,
                                       const void *msg,
                                       size_t len);

/**
 * Receives the oldest message; EMPTY if there is none. Never blocks.
 */
shmesh_error_t shmesh_link_receive(const shmesh_link_t *link, shmesh_message_t *message);

/**
 * Releases a message: its buffers can be loaned again.
 */
shmesh_error_t shmesh_message_release(shmesh_message_t *message);

/**
 * Sends the first `msg_len` and `data_len` bytes of a loan as a request; `pending` receives its replies. Only on the
 * secondary side of a link with requests. After success the loan has ended. After a failure it can be sent again or
 * dropped, except after EVICTED. FULL also if this client has the maximum number of pending requests.
 */
shmesh_error_t shmesh_loan_request(shmesh_loan_t *loan,
                                   int32_t msg_id,
                                   int32_t cell_id,
                                   size_t msg_len,
                                   size_t data_len,
                                   shmesh_pending_t *pending);

/**
 * Sends a request of up to 104 bytes, without a buffer. Otherwise as `shmesh_loan_request`.
 */
shmesh_error_t shmesh_link_request_inline(const shmesh_link_t *link,
                                          int32_t msg_id,
                                          int32_t cell_id,
                                          const void *msg,
                                          size_t len,
                                          shmesh_pending_t *pending);

/**
 * Waits for the next reply, at most `timeout_ns` nanoseconds (negative: without a limit; 0: returns EMPTY instead of
 * TIMEOUT), and takes it. Release the reply with `shmesh_message_release`. Sets `*is_last` to whether no further reply
 * follows; `is_last` may be NULL.
 *
 * PEER_GONE: the server ended before its last reply. UNANSWERED: the server dropped the request. Earlier replies are
 * returned before these errors. ENDED: the last reply was taken before, or `shmesh_pending_drop` was called.
 */
shmesh_error_t shmesh_pending_wait(const shmesh_pending_t *pending,
                                   int64_t timeout_ns,
                                   shmesh_message_t *reply,
                                   bool *is_last);

/**
 * Ends a pending request: waiting replies are freed, and no further ones are received.
 */
shmesh_error_t shmesh_pending_drop(shmesh_pending_t *pending);

/**
 * Waits for a request, at most `timeout_ns` nanoseconds; negative: without a limit. Only on the primary side.
 */
shmesh_error_t shmesh_link_wait_request(const shmesh_link_t *link, int64_t timeout_ns);

/**
 * Receives the oldest request; EMPTY if there is none. Never blocks. Only on the primary side.
 */
shmesh_error_t shmesh_link_receive_request(const shmesh_link_t *link, shmesh_request_t *request);

/**
 * Sends the first `msg_len` and `data_len` bytes of a loan as a reply. Pass false for `is_last` if more replies follow. At most 7
 * replies wait for the client, or fewer if it has not taken replies to its other requests. Beyond that this returns FULL at once:
 * wait with `shmesh_request_wait_room`. UNWANTED: the client does not wait any more. After success and UNWANTED the loan has
 * ended.
 */
shmesh_error_t shmesh_request_reply(const shmesh_request_t *request,
                                    shmesh_loan_t *loan,
                                    int32_t msg_id,
                                    int32_t cell_id,
                                    size_t msg_len,
                                    size_t data_len,
                                    bool is_last);

/**
 * Sends a reply of up to 112 bytes, without a buffer. Otherwise as `shmesh_request_reply`.
 */
shmesh_error_t shmesh_request_reply_inline(const shmesh_request_t *request,
                                           int32_t msg_id,
                                           int32_t cell_id,
                                           const void *msg,
                                           size_t len,
                                           bool is_last);

/**
 * Waits until there is room for one more reply, or the client does not wait any more; at most `timeout_ns`
 * nanoseconds, negative: without a limit.
 */
shmesh_error_t shmesh_request_wait_room(const shmesh_request_t *request, int64_t timeout_ns);

/**
 * Releases a request and frees its buffers. If no last reply was sent, its client gets UNANSWERED.
 */
shmesh_error_t shmesh_request_release(shmesh_request_t *request);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SHMESH_H */
