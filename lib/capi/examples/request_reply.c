/* Request and reply: two clients ask one server, and each gets its own answers.
 *
 * cc request_reply.c $(pkg-config --cflags --libs shmesh) */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <shmesh.h>

enum { CLIENTS = 2, REQUESTS = 100, SQUARE = 1 };

static const char CONFIG[] = "links:\n"
                             "  - name: numbers\n"
                             "    requests: { window: 8 }\n"; /* that each client can have pending */

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
    must(shmesh_link_attach("numbers", SHMESH_SECONDARY, &patient, &link));
    return link;
}

static void ask(long first)
{
    shmesh_link_t *link = attached();
    for (long n = first; n < first + REQUESTS; n++) {
        shmesh_pending_t pending;
        shmesh_message_t reply;
        long square;
        must(shmesh_link_request_inline(link, SQUARE, 0, &n, sizeof(n), &pending));
        /* With a timeout, so that a server that hangs is noticed. A server that dies is SHMESH_ERROR_PEER_GONE. */
        must(shmesh_pending_wait(&pending, 60 * 1000000000LL, &reply, NULL));
        memcpy(&square, reply.msg, sizeof(square));
        must(shmesh_message_release(&reply));
        must(shmesh_pending_drop(&pending));
        if (square != n * n)
            exit(1);
    }
    must(shmesh_link_close(link));
}

static void answer(shmesh_request_t *request)
{
    long n;
    /* Without a reply, the client gets SHMESH_ERROR_UNANSWERED. */
    if (request->message.msg_id == SQUARE && request->message.msg_len == sizeof(n)) {
        memcpy(&n, request->message.msg, sizeof(n));
        long square = n * n;
        must(shmesh_request_reply_inline(request, SQUARE, 0, &square, sizeof(square), true));
    }
    must(shmesh_request_release(request));
}

int main(void)
{
    pid_t clients[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        clients[i] = fork();
        if (clients[i] == 0) {
            ask(1000 * i);
            return 0;
        }
    }
    shmesh_link_t *link = created();
    for (int i = 0; i < CLIENTS * REQUESTS; i++) {
        shmesh_request_t request;
        must(shmesh_link_wait_request(link, -1));
        must(shmesh_link_receive_request(link, &request));
        answer(&request);
    }
    int failed = 0;
    for (int i = 0; i < CLIENTS; i++) {
        int status;
        waitpid(clients[i], &status, 0);
        failed |= status;
    }
    printf("answered %d requests of %d clients\n", CLIENTS * REQUESTS, CLIENTS);
    must(shmesh_link_close(link));
    return failed != 0;
}
