/* One writer and three readers, each of which gets every message: as a trainer that gives new weights to its inference ranks.
 *
 * cc broadcast.c $(pkg-config --cflags --libs shmesh) */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <shmesh.h>

enum { READERS = 3, VERSIONS = 10, BYTES = 4096 };

static const char CONFIG[] = "links:\n"
                             "  - name: weights\n"
                             "    ring: { mode: broadcast, len: 4, slow: wait }\n"; /* the slowest reader sets the pace */

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
    must(shmesh_link_attach("weights", SHMESH_SECONDARY, &patient, &link));
    return link;
}

static void read_all(void)
{
    shmesh_link_t *link = attached();
    for (int version = 0; version < VERSIONS; version++) {
        shmesh_message_t message;
        must(shmesh_link_wait(link, -1));
        must(shmesh_link_receive(link, &message));
        const unsigned char *weights = (const unsigned char *)message.data;
        if (message.msg_id != version || message.data_len != BYTES || weights[BYTES - 1] != version)
            exit(1);
        must(shmesh_message_release(&message));
    }
    must(shmesh_link_close(link));
}

static void write_version(shmesh_link_t *link, int version)
{
    shmesh_loan_t loan;
    shmesh_error_t result;
    while ((result = shmesh_link_loan(link, SHMESH_CPU_DATA, &loan)) == SHMESH_ERROR_EXHAUSTED)
        sched_yield();
    must(result);
    memset(loan.data, version, BYTES);
    while ((result = shmesh_loan_send(&loan, version, 0, 0, BYTES)) == SHMESH_ERROR_FULL)
        sched_yield();
    must(result);
    must(shmesh_link_notify(link));
}

int main(void)
{
    pid_t readers[READERS];
    for (int i = 0; i < READERS; i++) {
        readers[i] = fork();
        if (readers[i] == 0) {
            read_all();
            return 0;
        }
    }
    shmesh_link_t *link = created();
    /* A reader gets what is sent after it attached. */
    must(shmesh_link_wait_for_readers(link, READERS, -1));
    for (int version = 0; version < VERSIONS; version++)
        write_version(link, version);
    int failed = 0;
    for (int i = 0; i < READERS; i++) {
        int status;
        waitpid(readers[i], &status, 0);
        failed |= status;
    }
    printf("%d readers have read %d versions each\n", READERS, VERSIONS);
    must(shmesh_link_close(link));
    return failed != 0;
}
