/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef KC_ARGS_H
#define KC_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "cuda_abi.h"
#include "result.h"

enum args_command {
    ARGS_PROBE,
    ARGS_RUN,
    ARGS_DUMP,
    ARGS_RESTORE,
    ARGS_PARK,
    ARGS_UNPARK,
    ARGS_VERSION,
    ARGS_HELP
};
enum args_leave { LEAVE_RUNNING, LEAVE_STOPPED, LEAVE_KILLED };
enum args_pidns { PIDNS_AUTO, PIDNS_NEVER, PIDNS_ALWAYS };

enum { ARGS_WINDOW_DIRS_MAX = 64, ARGS_GPU_MAP_MAX = 64 };

struct args {
    enum args_command command;
    const char *log;
    int env_fd;             /* -1: the environment of this process */
    char **program;         /* NULL-terminated: what comes after -- */
    pid_t pid;
    const char *images_dir;
    const char *pids_file;
    double timeout;         /* seconds; all timeouts */
    double window_timeout;
    double hold_timeout;
    uint64_t ghost_limit;   /* bytes */
    enum args_leave leave;
    const char *window_dirs[ARGS_WINDOW_DIRS_MAX];
    size_t window_dir_count;
    bool hold;
    enum args_pidns pid_namespace;
    double gpu_timeout;     /* for the GPU's work to end, or for room on it */
    struct cuda_gpu_pair gpu_map[ARGS_GPU_MAP_MAX];
    size_t gpu_map_count;
    struct cuda_gpu_need gpu_needs[ARGS_GPU_MAP_MAX];
    size_t gpu_need_count;
    bool gpu_to_store;      /* GPU memory is stored in files where the driver offers that */
    bool parked;            /* the kernel may be parked, else what has no GPU memory has lost it */
    bool stream;            /* images come through a socket in images_dir */
};

bool args_parse(int argc, char **argv, struct args *args, struct kc_result *result);
extern const char args_usage[];

#endif
