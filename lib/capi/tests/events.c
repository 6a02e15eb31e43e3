/* A process gets the events of others that attach, detach and die: by waiting, and by epoll. C and C++. */
#include "check.h"

#include <sys/epoll.h>

/* Sleeps until there is an event. */
typedef void (*sleep_fn)(shmesh_link_t *link, int epoll);

static void by_waiting(shmesh_link_t *link, int epoll)
{
    (void)epoll;
    OK(shmesh_link_wait_event(link, -1));
}

static void by_epoll(shmesh_link_t *link, int epoll)
{
    struct epoll_event ready;
    CHECK(epoll_wait(epoll, &ready, 1, -1) == 1);
    while (shmesh_link_take_signal(link) == SHMESH_OK) {
    }
}

static void expect_event(shmesh_link_t *link, int epoll, sleep_fn sleep_for, int kind, pid_t pid)
{
    shmesh_event_t event;
    while (shmesh_link_next_event(link, &event) != SHMESH_OK)
        sleep_for(link, epoll);
    CHECK(event.kind == kind && event.pid == (uint32_t)pid);
    CHECK(event.side == SHMESH_SECONDARY && event.seat < 64 && event.missed == 0);
}

static void come_and_go(void)
{
    char order;
    shmesh_link_t *link = attached("events");
    CHECK(read(STDIN_FILENO, &order, 1) == 1);
    OK(shmesh_link_close(link));
    CHECK(read(STDIN_FILENO, &order, 1) == 1);
    link = attached("events");
    for (;;)
        pause();
}

int main(int argc, char **argv)
{
    static const sleep_fn ways[] = {by_waiting, by_epoll};
    (void)argv;
    begin();
    if (argc > 1)
        come_and_go();
    shmesh_link_t *link = created("events");
    shmesh_event_t event;
    CHECK(shmesh_link_next_event(link, &event) == SHMESH_ERROR_EMPTY);
    CHECK(shmesh_link_next_event(link, NULL) == SHMESH_ERROR_ARGUMENT);
    CHECK(shmesh_link_next_event(NULL, &event) == SHMESH_ERROR_ARGUMENT);
    CHECK(shmesh_link_wait_event(link, 1000) == SHMESH_ERROR_TIMEOUT);
    int fd, epoll = epoll_create1(EPOLL_CLOEXEC);
    OK(shmesh_link_fd(link, &fd));
    struct epoll_event wanted;
    memset(&wanted, 0, sizeof(wanted));
    wanted.events = EPOLLIN;
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &wanted) == 0);
    for (int round = 0; round < 6; round++) {
        sleep_fn sleep_for = ways[round % 2];
        int orders[2];
        CHECK(pipe2(orders, O_CLOEXEC) == 0 && dup2(orders[0], STDIN_FILENO) == STDIN_FILENO);
        pid_t peer = start_again("peer", NULL, NULL);
        expect_event(link, epoll, sleep_for, SHMESH_EVENT_ATTACHED, peer);
        CHECK(write(orders[1], "x", 1) == 1);
        expect_event(link, epoll, sleep_for, SHMESH_EVENT_DETACHED, peer);
        CHECK(write(orders[1], "x", 1) == 1);
        expect_event(link, epoll, sleep_for, SHMESH_EVENT_ATTACHED, peer);
        CHECK(kill(peer, SIGKILL) == 0 && waitpid(peer, NULL, 0) == peer);
        expect_event(link, epoll, sleep_for, SHMESH_EVENT_DIED, peer);
        CHECK(shmesh_link_next_event(link, &event) == SHMESH_ERROR_EMPTY);
        CHECK(close(orders[0]) == 0 && close(orders[1]) == 0);
    }
    CHECK(close(epoll) == 0);
    shmesh_link_t *forwarder = attached("events");
    uint64_t lost = 0;
    OK(shmesh_link_report_lost(forwarder, 3));
    CHECK(shmesh_link_report_lost(NULL, 3) == SHMESH_ERROR_ARGUMENT);
    OK(shmesh_link_lost(link, &lost));
    CHECK(lost == 3);
    do
        OK(shmesh_link_next_event(link, &event));
    while (event.kind == SHMESH_EVENT_ATTACHED);
    CHECK(event.kind == SHMESH_EVENT_LOST && event.missed == 3);
    OK(shmesh_link_close(forwarder));
    OK(shmesh_link_close(link));
    return 0;
}
