/* SPDX-License-Identifier: BSD-3-Clause */
/* What `run` and `restore` share: one kernel's tree, from its start to the reaping of its last
 * process. */
#ifndef KC_SUPERVISE_H
#define KC_SUPERVISE_H

#include <stdbool.h>
#include <sys/types.h>

#include "io.h"
#include "result.h"

struct supervisor {
    pid_t root;           /* the kernel process, 0 while there is none */
    bool over;            /* the kernel process has ended and was reaped */
    int status;           /* its wait status */
    int signals;          /* signalfd */
    struct io_lines lines;
    bool held;
    double hold_deadline;
    double kill_at;       /* when an orderly end turns into SIGKILL; 0: no end was asked for */
    bool killed;
};

/* Blocks and collects signals, becomes a subreaper. */
bool supervise_init(struct supervisor *supervisor, struct kc_result *result);
/* Reaps whatever has ended, without waiting. */
void supervise_reap(struct supervisor *supervisor);
/* Runs until the kernel has ended and all else with it; the exit status of this program. */
int supervise(struct supervisor *supervisor);
/* Ends every descendant and reaps it (for failed starts). */
void supervise_abandon(struct supervisor *supervisor);

#endif
