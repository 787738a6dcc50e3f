/* SPDX-License-Identifier: BSD-3-Clause */
/* Finding CRIU, running it with nothing of the caller's, and reading what it logged. */
#ifndef KC_CRIU_H
#define KC_CRIU_H

#include <limits.h>
#include <stdbool.h>
#include <sys/types.h>

#include "json.h"
#include "result.h"
#include "tree.h"

struct criu {
    char path[PATH_MAX];
    char version[32];
};

struct criu_process {
    pid_t pid;
    int pidfd;
    int go; /* CRIU starts when a byte is written here, and never when it is closed first */
};

enum { CRIU_ARGS_MAX = 48 };

struct criu_args {
    const char *argv[CRIU_ARGS_MAX];
    unsigned count;
    bool overflow;
};

/* "Version: 4.2.1" and the like; true when it is 4.2 or newer. */
bool criu_parse_version(const char *text, char *version, size_t capacity, bool *new_enough);
bool criu_find(struct criu *criu, struct kc_result *result);

void criu_arg(struct criu_args *args, const char *arg);
/* What dump and restore have in common. */
void criu_common_args(struct criu_args *args, const char *command, const char *log);

/* Nothing but what is built into CRIU: a plugin for CUDA that is installed beside it does the same things
 * as cuda.c, and knows nothing of other GPUs. */
void criu_no_plugins(struct criu_args *args);

/* Opens a folder of images: a real folder, the caller's own, not writable by others. */
int criu_open_images(const char *path, struct kc_result *result);
/* A small file of PIDs beside the images: tasks that were stopped by job control when they were
 * captured. CRIU's --leave-stopped stops all, so the images alone do not say whom to leave stopped. */
bool criu_write_stopped(int images, const struct tree *before);
/* Marks those in `tree` that the file names (state 'T'), all others as running. */
void criu_mark_stopped(int images, struct tree *tree);
/* Forks the CRIU child; it runs with its working folder in `images`. */
bool criu_spawn(const struct criu *criu, const struct criu_args *args, int images,
                struct criu_process *process, struct kc_result *result);
bool criu_go(struct criu_process *process);
/* Lets it fail in its own orderly way at its next write. */
void criu_cancel(const struct criu_process *process);
void criu_close(struct criu_process *process);
/* From a wait status: true for success. */
bool criu_succeeded(int status, char *text, size_t capacity);

/* Writes the error event with CRIU's own last error lines. */
void criu_error_event(const struct kc_result *result, int images, const char *log);
/* Whether the log, or the file system itself, says that space ran out. */
bool criu_out_of_space(int images, const char *log);

#endif
