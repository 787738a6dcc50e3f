/* SPDX-License-Identifier: BSD-3-Clause */
/* A process that puts things right should this program be killed in the middle: it thaws the tree
 * after a dump, and removes what is half restored. */
#ifndef KC_GUARD_H
#define KC_GUARD_H

#include <stdbool.h>
#include <sys/types.h>

#include "result.h"
#include "tree.h"

struct guard {
    pid_t pid;
    int pipe;
};

/* Forks the guard of `root_pid`, which watches `criu` (a pidfd) too. `before` is the tree as it was
 * before the dump. */
bool guard_start(struct guard *guard, pid_t root_pid, pid_t criu, int criu_pidfd,
                 const struct tree *before, struct kc_result *result);
/* The guard of a restore: should this program be killed while CRIU is at work, it ends CRIU and what
 * has come into being so far. `pids` are the numbers that the tree needs; none of them was in use. */
bool guard_start_restore(struct guard *guard, int criu_pidfd, const pid_t *pids, size_t count,
                         struct kc_result *result);
/* The tree is thawed, or is to stay stopped: the guard goes away. */
void guard_dismiss(struct guard *guard);

#endif
