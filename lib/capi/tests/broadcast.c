/* One writer and readers in processes of their own: each reader gets everything, a dead one holds up none, a slow one is evicted, and a
 * reader of the latest value counts what it did not get. C and C++. */
#include "check.h"

#define MESSAGES 500

static const char *with_readers(const char *name, const char *ring)
{
    static char yaml[1024];
    snprintf(yaml, sizeof(yaml),
             "links:\n  - name: %s\n    ring: { mode: broadcast, %s }\n    pools:\n"
             "      cpu_msg: { buf_size_bytes: 512, pool_len: 8 }\n      cpu_data: { buf_size_bytes: 4096, pool_len: 4 }\n",
             name, ring);
    return yaml;
}

static shmesh_link_t *writer_of(const char *name, const char *ring)
{
    shmesh_config_t *config;
    shmesh_link_t *link;
    OK(shmesh_config_from_yaml(with_readers(name, ring), &config));
    OK(shmesh_link_create(config, 0, NULL, &link));
    shmesh_config_free(config);
    return link;
}

static void until_readers(shmesh_link_t *link, size_t wanted)
{
    size_t readers = 0;
    do {
        usleep(500);
        OK(shmesh_link_readers(link, &readers));
    } while (readers != wanted);
}

/* In the ring, in a MSG buffer, or with DATA. */
static shmesh_error_t try_send(shmesh_link_t *link, int32_t id)
{
    shmesh_loan_t loan;
    if (id % 3 == 0)
        return shmesh_link_send_inline(link, id, 0, &id, sizeof(id));
    size_t data_len = id % 3 == 1 ? 0 : 4096;
    shmesh_error_t done = shmesh_link_loan(link, data_len == 0 ? SHMESH_NO_DATA : SHMESH_CPU_DATA, &loan);
    if (done != SHMESH_OK)
        return done;
    memcpy(loan.msg, &id, sizeof(id));
    if (data_len != 0)
        memset(loan.data, id & 0xff, data_len);
    done = shmesh_loan_send(&loan, id, 0, sizeof(id), data_len);
    if (done != SHMESH_OK)
        OK(shmesh_loan_drop(&loan));
    return done;
}

/* Sends one message; while there is no room for it, ends the process `in_the_way`, once. */
static void send_to_all(shmesh_link_t *link, int32_t id, pid_t *in_the_way)
{
    for (;;) {
        shmesh_error_t sent = try_send(link, id);
        OK(shmesh_link_notify(link));
        if (sent == SHMESH_OK)
            return;
        CHECK(sent == SHMESH_ERROR_FULL || sent == SHMESH_ERROR_EXHAUSTED);
        if (in_the_way != NULL && *in_the_way != 0) {
            CHECK(kill(*in_the_way, SIGKILL) == 0 && waitpid(*in_the_way, NULL, 0) == *in_the_way);
            *in_the_way = 0;
        }
        usleep(500);
    }
}

static int32_t checked(const shmesh_message_t *message)
{
    int32_t id = message->msg_id;
    CHECK(message->msg_len == sizeof(id) && memcmp(message->msg, &id, sizeof(id)) == 0);
    CHECK(message->data_len == (id % 3 == 2 ? 4096u : 0u));
    for (size_t i = 0; i < message->data_len; i++)
        CHECK(((const unsigned char *)message->data)[i] == (id & 0xff));
    return id;
}

static void next(shmesh_link_t *link, shmesh_message_t *message)
{
    for (;;) {
        shmesh_error_t received = shmesh_link_receive(link, message);
        if (received == SHMESH_OK)
            return;
        CHECK(received == SHMESH_ERROR_EMPTY);
        OK(shmesh_link_wait(link, -1));
    }
}

/* Gets everything. */
static void read_all(void)
{
    shmesh_link_t *link = attached("all");
    shmesh_message_t message;
    uint64_t lost = 1;
    for (int32_t id = 0; id < MESSAGES; id++) {
        next(link, &message);
        CHECK(checked(&message) == id);
        OK(shmesh_message_release(&message));
    }
    OK(shmesh_link_lost(link, &lost));
    CHECK(lost == 0);
    OK(shmesh_link_close(link));
    _exit(0);
}

/* Never releases the first message that is in buffers. A reader that gets no processor for a while is evicted before it has one. */
static void hold(const char *name)
{
    shmesh_link_t *link = attached(name);
    shmesh_message_t message;
    int holds = 0;
    for (;;) {
        shmesh_error_t received = shmesh_link_receive(link, &message);
        if (received == SHMESH_OK && !holds && message.data_len != 0) {
            holds = 1;
        } else if (received == SHMESH_OK) {
            OK(shmesh_message_release(&message));
        } else if (received == SHMESH_ERROR_EMPTY) {
            usleep(500);
        } else {
            CHECK(received == SHMESH_ERROR_EVICTED);
            _exit(0);
        }
    }
}

/* Gets newer and newer values up to the last. */
static void read_latest(void)
{
    shmesh_link_t *link = attached("latest");
    shmesh_message_t message;
    uint64_t lost, received = 0;
    int32_t id = -1;
    while (id != MESSAGES - 1) {
        next(link, &message);
        CHECK(checked(&message) > id);
        id = message.msg_id;
        received++;
        OK(shmesh_message_release(&message));
    }
    OK(shmesh_link_lost(link, &lost));
    CHECK(received + lost == MESSAGES);
    OK(shmesh_link_close(link));
    _exit(0);
}

static void everything_to_all(void)
{
    shmesh_link_t *link = writer_of("all", "len: 8");
    pid_t readers[3], holder = start_again("hold", "all", NULL);
    for (int i = 0; i < 3; i++)
        readers[i] = start_again("all", NULL, NULL);
    OK(shmesh_link_wait_for_readers(link, 4, -1));
    CHECK(shmesh_link_wait_for_readers(link, 5, 0) == SHMESH_ERROR_TIMEOUT);
    for (int32_t id = 0; id < MESSAGES; id++)
        send_to_all(link, id, &holder);
    CHECK(holder == 0);
    for (int i = 0; i < 3; i++)
        succeeds(readers[i]);
    until_readers(link, 0);
    OK(shmesh_link_close(link));
}

static void slow_reader_is_evicted(void)
{
    shmesh_link_t *link = writer_of("evict", "len: 4, slow: evict, evict_after_ms: 2000");
    pid_t holder = start_again("hold", "evict", NULL);
    until_readers(link, 1);
    for (int32_t id = 0; id < 40; id++)
        send_to_all(link, id, NULL);
    succeeds(holder);
    OK(shmesh_link_close(link));
}

static void latest_value(void)
{
    shmesh_link_t *link = writer_of("latest", "len: 2, slow: skip, history: 1");
    pid_t readers[2];
    for (int i = 0; i < 2; i++)
        readers[i] = start_again("latest", NULL, NULL);
    until_readers(link, 2);
    for (int32_t id = 0; id < MESSAGES; id++)
        OK(try_send(link, id));
    OK(shmesh_link_notify(link));
    for (int i = 0; i < 2; i++)
        succeeds(readers[i]);
    shmesh_link_t *newcomer = attached("latest");
    shmesh_message_t message;
    OK(shmesh_link_receive(newcomer, &message));
    CHECK(checked(&message) == MESSAGES - 1);
    OK(shmesh_message_release(&message));
    OK(shmesh_link_close(newcomer));
    OK(shmesh_link_close(link));
}

int main(int argc, char **argv)
{
    begin();
    if (argc > 2)
        hold(argv[2]);
    if (argc > 1 && strcmp(argv[1], "all") == 0)
        read_all();
    if (argc > 1)
        read_latest();
    CHECK(shmesh_link_readers(NULL, NULL) == SHMESH_ERROR_ARGUMENT);
    CHECK(shmesh_link_wait_for_readers(NULL, 1, 0) == SHMESH_ERROR_ARGUMENT);
    everything_to_all();
    slow_reader_is_evicted();
    latest_value();
    return 0;
}
