/* How a program here starts its peers. Read by C and by C++, after CHECK is defined. */
#ifndef AGAIN_H
#define AGAIN_H

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* Longer than anything here takes, on the slowest machine. */
#define HANGS_S 300

/* First in each main: the kernel ends a process that hangs, and a peer whose parent has ended. */
static inline void begin(void)
{
    alarm(HANGS_S);
    CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
}

/* Starts this program again with these arguments; NULL ends them. Not by fork: the address sanitizer of GCC 12 does not release its
 * own locks in a forked child, so one of some 16,000 children hangs. */
static inline pid_t start_again(const char *first, const char *second, const char *third)
{
    const char *args[] = {"again", first, second, third, NULL};
    pid_t child;
    CHECK(posix_spawn(&child, "/proc/self/exe", NULL, NULL, (char *const *)args, environ) == 0);
    return child;
}

static inline void succeeds(pid_t child)
{
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

#endif
