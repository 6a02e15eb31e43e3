/* A stream of large messages from one process to another: written where they are read.
 *
 * cc stream.c $(pkg-config --cflags --libs shmesh) */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <shmesh.h>

enum { MESSAGES = 1000, BYTES = 65536 };

static const char CONFIG[] = "links:\n"
                             "  - name: batches\n"
                             "    ring: { mode: spsc }\n" /* one sender, one receiver */
                             "    pools: { cpu_data: { buf_size_bytes: 65536, pool_len: 32 } }\n";

static void must(shmesh_error_t result)
{
    if (result != SHMESH_OK) {
        fprintf(stderr, "%s: %s\n", shmesh_error_string(result), shmesh_last_error());
        exit(1);
    }
}

static shmesh_link_t *created(void)
{
    shmesh_config_t *config;
    shmesh_link_t *link;
    must(shmesh_config_from_yaml(CONFIG, &config));
    must(shmesh_link_create(config, 0, NULL, &link));
    shmesh_config_free(config);
    return link;
}

/* Waits a minute for the primary to create the link. */
static shmesh_link_t *attached(void)
{
    const shmesh_options_t patient = {.timeout_ns = 60 * 1000000000ULL};
    shmesh_link_t *link;
    must(shmesh_link_attach("batches", SHMESH_SECONDARY, &patient, &link));
    return link;
}

static void send_all(void)
{
    shmesh_link_t *link = attached();
    for (int number = 0; number < MESSAGES; number++) {
        shmesh_loan_t loan;
        shmesh_error_t result;
        /* The receiver is behind, and has all buffers. */
        while ((result = shmesh_link_loan(link, SHMESH_CPU_DATA, &loan)) == SHMESH_ERROR_EXHAUSTED)
            sched_yield();
        must(result);
        memcpy(loan.msg, &number, sizeof(number));
        memset(loan.data, 7, BYTES);
        must(shmesh_loan_send(&loan, 1, 0, sizeof(number), BYTES));
        must(shmesh_link_notify(link)); /* a system call only if the receiver sleeps */
    }
    must(shmesh_link_close(link));
}

int main(void)
{
    pid_t sender = fork();
    if (sender == 0) {
        send_all();
        return 0;
    }
    shmesh_link_t *link = created();
    long sum = 0;
    for (int i = 0; i < MESSAGES; i++) {
        shmesh_message_t message;
        int number;
        must(shmesh_link_wait(link, -1));
        must(shmesh_link_receive(link, &message));
        if (message.msg_len != sizeof(number) || message.data_len != BYTES)
            return 1;
        memcpy(&number, message.msg, sizeof(number));
        sum += number;
        must(shmesh_message_release(&message)); /* the buffer is free again */
    }
    printf("received %d messages of %d bytes\n", MESSAGES, BYTES);
    int status;
    waitpid(sender, &status, 0);
    must(shmesh_link_close(link));
    return sum == (long)MESSAGES * (MESSAGES - 1) / 2 && status == 0 ? 0 : 1;
}
