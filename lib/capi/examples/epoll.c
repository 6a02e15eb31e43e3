/* Many links in one event loop: a descriptor for each, one thread for all.
 *
 * cc epoll.c $(pkg-config --cflags --libs shmesh) */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <shmesh.h>

enum { LINKS = 3 };

static const char CONFIG[] = "links: [{ name: fronthaul }, { name: midhaul }, { name: backhaul }]\n";

static void must(shmesh_error_t result)
{
    if (result != SHMESH_OK) {
        fprintf(stderr, "%s: %s\n", shmesh_error_string(result), shmesh_last_error());
        exit(1);
    }
}

/* In a process of its own: sends its link's name, and waits for the answer. */
static void greet(const char *name)
{
    const shmesh_options_t patient = {.timeout_ns = 60 * 1000000000ULL};
    shmesh_link_t *link;
    shmesh_message_t answer;
    must(shmesh_link_attach(name, SHMESH_SECONDARY, &patient, &link));
    must(shmesh_link_send_inline(link, 1, 0, name, strlen(name)));
    must(shmesh_link_notify(link));
    must(shmesh_link_wait(link, -1));
    must(shmesh_link_receive(link, &answer));
    must(shmesh_message_release(&answer));
    must(shmesh_link_close(link));
}

/* Takes the signals first, then all that they were for: what comes later signals again. */
static void serve(shmesh_link_t *link, int *received, int *left)
{
    shmesh_message_t message;
    shmesh_event_t event;
    shmesh_error_t result;
    while ((result = shmesh_link_take_signal(link)) == SHMESH_OK)
        ;
    while (result == SHMESH_ERROR_EMPTY && (result = shmesh_link_receive(link, &message)) == SHMESH_OK) {
        printf("%s: %.*s\n", shmesh_link_name(link), (int)message.msg_len, (const char *)message.msg);
        must(shmesh_message_release(&message));
        must(shmesh_link_send_inline(link, 2, 0, "welcome", 7));
        must(shmesh_link_notify(link));
        ++*received;
        result = SHMESH_ERROR_EMPTY;
    }
    while (result == SHMESH_ERROR_EMPTY && (result = shmesh_link_next_event(link, &event)) == SHMESH_OK) {
        *left += event.kind == SHMESH_EVENT_DETACHED || event.kind == SHMESH_EVENT_DIED;
        result = SHMESH_ERROR_EMPTY;
    }
    if (result != SHMESH_ERROR_EMPTY)
        must(result);
}

int main(void)
{
    shmesh_config_t *config;
    shmesh_link_t *links[LINKS];
    must(shmesh_config_from_yaml(CONFIG, &config));
    for (int i = 0; i < LINKS; i++) {
        if (fork() == 0) {
            greet(shmesh_config_name(config, i));
            return 0;
        }
    }
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < LINKS; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = i};
        int fd;
        must(shmesh_link_create(config, i, NULL, &links[i]));
        must(shmesh_link_fd(links[i], &fd));
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0)
            return 1;
    }
    int received = 0, left = 0;
    /* What came before there was a descriptor does not make it readable. */
    for (int i = 0; i < LINKS; i++)
        serve(links[i], &received, &left);
    while (received < LINKS || left < LINKS) {
        struct epoll_event ready[8];
        int count = epoll_wait(epoll, ready, 8, -1);
        for (int i = 0; i < count; i++)
            serve(links[ready[i].data.u32], &received, &left);
    }
    printf("%d messages of %d peers, which have left\n", received, left);
    while (wait(NULL) > 0)
        ;
    for (int i = 0; i < LINKS; i++)
        must(shmesh_link_close(links[i]));
    shmesh_config_free(config);
    return 0;
}
