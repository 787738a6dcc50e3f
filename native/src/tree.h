/* SPDX-License-Identifier: BSD-3-Clause */
/* A process and all its descendants, each named by PID and start time. */
#ifndef KC_TREE_H
#define KC_TREE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct tree_task {
    pid_t pid;
    unsigned long long starttime;
    char state;
};

enum { TREE_MAX = 16384 };

struct tree {
    struct tree_task *tasks; /* the root first */
    size_t count;
    size_t capacity;
};

/* Fills `tree` with the root (when `with_root`) and its descendants. An empty tree is no error. */
bool tree_collect(struct tree *tree, pid_t root_pid, bool with_root);
void tree_remove(struct tree *tree, pid_t pid);
void tree_free(struct tree *tree);
const struct tree_task *tree_find(const struct tree *tree, pid_t pid);
/* Sends the signal only while PID and start time still name the recorded process. */
bool tree_signal_task(const struct tree_task *task, int signal);
/* SIGCONT for all, except those that `before` says were stopped already (NULL: none were). */
void tree_thaw(const struct tree *tree, const struct tree *before);
/* Waits until every thread of every process stands still; false when the deadline passes. */
bool tree_wait_stopped(const struct tree *tree, double deadline);
/* Whether the recorded process was in a job-control stop. */
bool tree_was_stopped(const struct tree *tree, const struct tree_task *task);
/* Bytes of memory that the images will hold about (anonymous and shared). */
uint64_t tree_memory(const struct tree *tree);

/* SIGKILLs every descendant of this process and reaps until none is left or the deadline passes.
 * `on_reap` sees each wait status. */
bool tree_end_descendants(double deadline, void (*on_reap)(pid_t pid, int status, void *data),
                          void *data);

#endif
