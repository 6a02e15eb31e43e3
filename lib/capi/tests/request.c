/* Two processes: requests and replies, a stream, a request that is dropped, and a server that dies. C and C++. */
#include "check.h"

static const char *with_requests(const char *name)
{
    static char yaml[1024];
    snprintf(yaml, sizeof(yaml), "%s    requests: { window: 2 }\n", small_link(name));
    return yaml;
}

static shmesh_link_t *server_of(const char *name)
{
    shmesh_config_t *config;
    shmesh_link_t *link;
    OK(shmesh_config_from_yaml(with_requests(name), &config));
    OK(shmesh_link_create(config, 0, NULL, &link));
    shmesh_config_free(config);
    return link;
}

static void take(shmesh_link_t *link, shmesh_request_t *request)
{
    OK(shmesh_link_wait_request(link, -1));
    OK(shmesh_link_receive_request(link, request));
}

/* Answers each inline request with its own bytes, streams 20 replies to one with DATA, and dies with the third kind. */
static void serve(void)
{
    shmesh_link_t *link = server_of("request");
    shmesh_request_t request;
    for (int i = 0; i < 100; i++) {
        take(link, &request);
        CHECK(request.message.msg_id == i && request.client < 64);
        OK(shmesh_request_reply_inline(&request, -i, 0, request.message.msg, request.message.msg_len, true));
        CHECK(shmesh_request_reply_inline(&request, 0, 0, NULL, 0, true) != SHMESH_OK);
        CHECK(shmesh_message_release(&request.message) == SHMESH_ERROR_ENDED);
        OK(shmesh_request_release(&request));
        CHECK(shmesh_request_release(&request) == SHMESH_ERROR_ENDED);
    }
    take(link, &request);
    CHECK(request.message.data_len == 4096 && ((const char *)request.message.data)[4095] == 7);
    for (int i = 0; i < 20; i++) {
        shmesh_loan_t loan;
        /* The client has the others, or they wait for it. */
        while (shmesh_link_loan(link, SHMESH_CPU_LARGE, &loan) == SHMESH_ERROR_EXHAUSTED)
            usleep(1000);
        CHECK(loan.data != NULL);
        memset(loan.data, i, loan.data_size);
        for (;;) {
            shmesh_error_t sent = shmesh_request_reply(&request, &loan, i, 0, 0, loan.data_size, i == 19);
            if (sent == SHMESH_OK)
                break;
            CHECK(sent == SHMESH_ERROR_FULL);
            OK(shmesh_request_wait_room(&request, -1));
        }
    }
    OK(shmesh_request_release(&request));
    take(link, &request);
    OK(shmesh_request_release(&request));
    take(link, &request);
    _exit(0);
}

int main(int argc, char **argv)
{
    (void)argv;
    begin();
    if (argc > 1)
        serve();
    pid_t child = start_again("serve", NULL, NULL);
    shmesh_link_t *link = attached("request");
    shmesh_pending_t pending, other;
    shmesh_message_t reply;
    bool is_last;
    for (int i = 0; i < 100; i++) {
        OK(shmesh_link_request_inline(link, i, 0, &i, sizeof(i), &pending));
        OK(shmesh_pending_wait(&pending, -1, &reply, &is_last));
        CHECK(is_last && reply.msg_id == -i && reply.msg_len == sizeof(i) && memcmp(reply.msg, &i, sizeof(i)) == 0);
        OK(shmesh_message_release(&reply));
        CHECK(shmesh_pending_wait(&pending, 0, &reply, NULL) == SHMESH_ERROR_ENDED);
        OK(shmesh_pending_drop(&pending));
        CHECK(shmesh_pending_drop(&pending) == SHMESH_ERROR_ENDED);
    }
    shmesh_loan_t loan;
    OK(shmesh_link_loan(link, SHMESH_CPU_DATA, &loan));
    memset(loan.data, 7, loan.data_size);
    OK(shmesh_loan_request(&loan, 1, 0, 0, loan.data_size, &pending));
    CHECK(shmesh_loan_drop(&loan) == SHMESH_ERROR_ENDED);
    for (int i = 0; i < 20; i++) {
        OK(shmesh_pending_wait(&pending, -1, &reply, &is_last));
        CHECK(reply.msg_id == i && is_last == (i == 19) && ((const char *)reply.data)[65535] == i);
        OK(shmesh_message_release(&reply));
    }
    OK(shmesh_pending_drop(&pending));
    /* One is dropped by its server, the other by the server's death. */
    OK(shmesh_link_request_inline(link, 1, 0, NULL, 0, &pending));
    OK(shmesh_link_request_inline(link, 2, 0, NULL, 0, &other));
    CHECK(shmesh_link_close(link) == SHMESH_ERROR_HELD);
    CHECK(shmesh_pending_wait(&pending, -1, &reply, NULL) == SHMESH_ERROR_UNANSWERED);
    CHECK(shmesh_pending_wait(&other, -1, &reply, NULL) == SHMESH_ERROR_PEER_GONE);
    CHECK(strstr(shmesh_last_error(), "process") != NULL);
    OK(shmesh_pending_drop(&pending));
    OK(shmesh_pending_drop(&other));
    CHECK(shmesh_link_receive_request(link, NULL) == SHMESH_ERROR_ARGUMENT);
    OK(shmesh_link_close(link));
    succeeds(child);
    return 0;
}
