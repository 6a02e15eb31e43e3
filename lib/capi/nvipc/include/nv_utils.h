/* Threads and paths, for NVIPC's programs. In libnvipc.so and libnvlog.so. All functions return -1 on failure. */
#ifndef NV_UTILS_H_INCLUDED_
#define NV_UTILS_H_INCLUDED_

#if defined(__cplusplus)
extern "C" {
#endif

/* Writes a path relative to the program's directory into at least 4096 bytes, and returns its length. */
int nv_get_absolute_path(char *absolute_path, const char *relative_path);

/* Sets SCHED_FIFO with this priority for the calling thread. Returns 0. */
int nv_set_sched_fifo_priority(int priority);

/* Pins the calling thread to this core. Returns 0. */
int nv_assign_thread_cpu_core(int cpu_id);

#if defined(__cplusplus)
}
#endif

#endif
