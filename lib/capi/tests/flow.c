/* Two processes: buffers of every pool both ways, inline messages, waiting, posts and poll. C and C++. */
#include "check.h"

static const int pools[] = {SHMESH_NO_DATA, SHMESH_CPU_DATA, SHMESH_CPU_LARGE};

static void send_one(shmesh_link_t *link, int i)
{
    if (i % 4 == 3) {
        OK(shmesh_link_send_inline(link, i, -i, "inline", 6));
        return;
    }
    shmesh_loan_t loan;
    int pool = pools[i % 3];
    OK(shmesh_link_loan(link, pool, &loan));
    CHECK(loan.msg_size == 512 && (loan.data != NULL) == (pool >= 0));
    memset(loan.msg, i, (size_t)(i % 512));
    if (loan.data != NULL)
        memset(loan.data, i + 1, loan.data_size);
    OK(shmesh_loan_send(&loan, i, -i, (size_t)(i % 512), loan.data_size));
}

static void receive_one(shmesh_link_t *link, int i)
{
    shmesh_message_t got;
    OK(shmesh_link_wait(link, -1));
    OK(shmesh_link_receive(link, &got));
    CHECK(got.msg_id == i && got.cell_id == -i);
    if (i % 4 == 3) {
        CHECK(got.msg_len == 6 && memcmp(got.msg, "inline", 6) == 0 && got.data == NULL);
    } else {
        CHECK(got.data_pool == pools[i % 3] && got.msg_len == (size_t)(i % 512));
        for (size_t at = 0; at < got.msg_len; at++)
            CHECK(((const unsigned char *)got.msg)[at] == (unsigned char)i);
        CHECK(got.data_len == (i % 3 == 0 ? 0u : i % 3 == 1 ? 4096u : 65536u));
        for (size_t at = 0; at < got.data_len; at++)
            CHECK(((const unsigned char *)got.data)[at] == (unsigned char)(i + 1));
    }
    OK(shmesh_message_release(&got));
}

#define ROUNDS 300

static void secondary(void)
{
    shmesh_link_t *link = attached("flow");
    for (int i = 0; i < ROUNDS; i++) {
        send_one(link, i);
        OK(shmesh_link_notify(link));
        receive_one(link, i + 1);
    }
    for (int slot = 0; slot < 20; slot++) {
        for (int i = 0; i < 3; i++)
            send_one(link, slot + i);
        OK(shmesh_link_post(link));
        OK(shmesh_link_wait_post(link, -1));
    }
    OK(shmesh_link_close(link));
}

int main(int argc, char **argv)
{
    (void)argv;
    begin();
    if (argc > 1) {
        secondary();
        return 0;
    }
    pid_t child = start_again("secondary", NULL, NULL);
    shmesh_link_t *link = created("flow");
    for (int i = 0; i < ROUNDS; i++) {
        receive_one(link, i);
        send_one(link, i + 1);
        OK(shmesh_link_notify(link));
    }
    int fd;
    OK(shmesh_link_fd(link, &fd));
    for (int slot = 0; slot < 20; slot++) {
        /* What was posted before the descriptor was taken need not have signalled. */
        while (shmesh_link_wait_post(link, 0) == SHMESH_ERROR_TIMEOUT) {
            struct pollfd ready = {fd, POLLIN, 0};
            CHECK(poll(&ready, 1, -1) >= 0);
            (void)shmesh_link_take_signal(link);
        }
        for (int i = 0; i < 3; i++)
            receive_one(link, slot + i);
        OK(shmesh_link_post(link));
    }
    succeeds(child);
    OK(shmesh_link_close(link));
    return 0;
}
