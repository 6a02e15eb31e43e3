/* A side that is killed and starts again: the other one keeps its handle, and what was sent stays sent.
 *
 * cc reconnect.c $(pkg-config --cflags --libs shmesh) */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <shmesh.h>

static void must(shmesh_error_t result)
{
    if (result != SHMESH_OK) {
        fprintf(stderr, "%s: %s\n", shmesh_error_string(result), shmesh_last_error());
        exit(1);
    }
}

static void expect(shmesh_link_t *link, const char *text)
{
    shmesh_message_t message;
    must(shmesh_link_wait(link, -1));
    must(shmesh_link_receive(link, &message));
    printf("%d received: %.*s\n", (int)getpid(), (int)message.msg_len, (const char *)message.msg);
    if (message.msg_len != strlen(text) || memcmp(message.msg, text, message.msg_len) != 0)
        exit(1);
    must(shmesh_message_release(&message));
}

static void say(shmesh_link_t *link, const char *text)
{
    must(shmesh_link_send_inline(link, 1, 0, text, strlen(text)));
    must(shmesh_link_notify(link));
}

/* The peer. The same call attaches at first and after a crash. */
static int peer(void)
{
    shmesh_link_t *link;
    must(shmesh_link_attach("fronthaul", SHMESH_SECONDARY, NULL, &link));
    say(link, "hello");
    expect(link, "sent while you were away");
    must(shmesh_link_close(link));
    return 0;
}

static pid_t start_peer(void)
{
    pid_t pid = fork();
    if (pid == 0) {
        execl("/proc/self/exe", "reconnect", "peer", (char *)NULL);
        _exit(1);
    }
    return pid;
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return strcmp(argv[1], "peer") == 0 ? peer() : 2;
    shmesh_config_t *config;
    shmesh_link_t *link;
    must(shmesh_config_default("fronthaul", &config));
    must(shmesh_link_create(config, 0, NULL, &link));
    shmesh_config_free(config);

    pid_t first = start_peer();
    expect(link, "hello");
    kill(first, SIGKILL);
    waitpid(first, NULL, 0);
    shmesh_event_t event = {0};
    /* Its buffers are recovered by then. */
    while (event.kind != SHMESH_EVENT_DIED) {
        must(shmesh_link_wait_event(link, -1));
        must(shmesh_link_next_event(link, &event));
    }
    printf("process %u has died\n", (unsigned)event.pid);
    say(link, "sent while you were away");

    int status;
    pid_t second = start_peer();
    expect(link, "hello");
    waitpid(second, &status, 0);
    must(shmesh_link_close(link));
    return status != 0;
}
