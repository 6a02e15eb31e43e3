/* A program with a logger of its own: lines of the library's helpers go there, and standard error gets none. */
#define _GNU_SOURCE
#include "nv_ipc_shm.h"
#include "nv_utils.h"
#include "nvlog.h"
#include "stat_log.h"

#include <sys/stat.h>

static char last[1024];
static int lines;

void nvlog_c_print(int level, int itag, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int head = snprintf(last, sizeof(last), "%d %d ", level, itag);
    vsnprintf(last + head, sizeof(last) - (size_t)head, format, args);
    va_end(args);
    lines++;
}

void nvlog_e_c_print(int level, int itag, const char *event, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int head = snprintf(last, sizeof(last), "%d %d %s ", level, itag, event);
    vsnprintf(last + head, sizeof(last) - (size_t)head, format, args);
    va_end(args);
    lines++;
}

static int is_last(const char *start, const char *part)
{
    return strncmp(last, start, strlen(start)) == 0 && strstr(last, part) != NULL;
}

int main(int argc, char **argv)
{
    if (argc != 2 || freopen(argv[1], "w", stderr) == NULL)
        return 2;
    /* Of libnvipc.so, of libnvlog.so, and of the program itself. */
    if (nv_ipc_shm_open(0, "absent", 0) != NULL || lines != 1 || !is_last("2 30 AERIAL_NVIPC_API_EVENT ", "absent"))
        return 3;
    stat_log_t *stat = stat_log_open("values", STAT_MODE_COUNTER, 3);
    if (stat == NULL || stat->print(stat) != 0 || stat->close(stat) != 0 || lines != 2 || !is_last("3 10 values: 0 values", "mean 0"))
        return 4;
    if (nv_assign_thread_cpu_core(-1) == 0 || lines != 3 || !is_last("2 10 AERIAL_THREAD_API_EVENT ", "core -1"))
        return 5;
    NVLOGI(7, "%s", "mine");
    struct stat written;
    if (lines != 4 || !is_last("5 7 ", "mine"))
        return 6;
    return fflush(stderr) == 0 && fstat(fileno(stderr), &written) == 0 && written.st_size == 0 ? 0 : 7;
}
