/* A hub with a link for each of many clients: small links, and one thread that polls all of them in turn. With epoll in place
 * of polling (epoll.c) the hub sleeps.
 *
 * cc many_links.c $(pkg-config --cflags --libs shmesh) */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <shmesh.h>

enum { LINKS = 32, ROUNDS = 10 };

/* 24 KiB in place of 25 MB: a ring of 16 messages, and 16 buffers of 256 bytes. */
static const char SMALL[] = "  - name: client-%d\n"
                            "    ring: { mode: spsc, len: 16 }\n"
                            "    pools: { cpu_msg: { buf_size_bytes: 256, pool_len: 16 },"
                            " cpu_data: { buf_size_bytes: 0, pool_len: 0 } }\n";

static void must(shmesh_error_t result)
{
    if (result != SHMESH_OK) {
        fprintf(stderr, "%s: %s\n", shmesh_error_string(result), shmesh_last_error());
        exit(1);
    }
}

/* In a process of its own, which could as well be one for each link. */
static void ask(void)
{
    const shmesh_options_t patient = {.timeout_ns = 60 * 1000000000ULL};
    shmesh_link_t *links[LINKS];
    for (int i = 0; i < LINKS; i++) {
        char name[32];
        snprintf(name, sizeof(name), "client-%d", i);
        must(shmesh_link_attach(name, SHMESH_SECONDARY, &patient, &links[i]));
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < LINKS; i++)
            must(shmesh_link_send_inline(links[i], round, 0, "ping", 4));
        for (int i = 0; i < LINKS; i++) {
            shmesh_message_t answer;
            must(shmesh_link_wait(links[i], -1));
            must(shmesh_link_receive(links[i], &answer));
            if (answer.msg_id != round || answer.msg_len != 4 || memcmp(answer.msg, "pong", 4) != 0)
                exit(1);
            must(shmesh_message_release(&answer));
        }
    }
    for (int i = 0; i < LINKS; i++)
        must(shmesh_link_close(links[i]));
}

int main(void)
{
    char yaml[LINKS * sizeof(SMALL) + 64] = "links:\n";
    for (int i = 0; i < LINKS; i++)
        sprintf(yaml + strlen(yaml), SMALL, i);
    pid_t client = fork();
    if (client == 0) {
        ask();
        return 0;
    }
    shmesh_config_t *config;
    shmesh_link_t *hub[LINKS];
    must(shmesh_config_from_yaml(yaml, &config));
    for (int i = 0; i < LINKS; i++)
        must(shmesh_link_create(config, i, NULL, &hub[i]));
    shmesh_config_free(config);

    /* A link without a message costs one load. */
    int served = 0;
    while (served < LINKS * ROUNDS) {
        int before = served;
        for (int i = 0; i < LINKS; i++) {
            shmesh_message_t message;
            shmesh_error_t result;
            while ((result = shmesh_link_receive(hub[i], &message)) == SHMESH_OK) {
                must(shmesh_link_send_inline(hub[i], message.msg_id, 0, "pong", 4));
                must(shmesh_link_notify(hub[i]));
                must(shmesh_message_release(&message));
                served++;
            }
            if (result != SHMESH_ERROR_EMPTY)
                must(result);
        }
        if (served == before)
            sched_yield();
    }
    printf("served %d messages on %d links\n", served, LINKS);
    int status;
    waitpid(client, &status, 0);
    for (int i = 0; i < LINKS; i++)
        must(shmesh_link_close(hub[i]));
    return status == 0 ? 0 : 1;
}
