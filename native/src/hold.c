/* SPDX-License-Identifier: BSD-3-Clause */
#include "hold.h"

#include <errno.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include "io.h"

static const double patience = 5.0; /* seconds for the stop to be reported */

/* A seized thread of a stopped process reports one PTRACE_EVENT_STOP and stays in that trap when
 * SIGCONT starts the others: only PTRACE_CONT, PTRACE_LISTEN and PTRACE_DETACH end it. */
bool hold_begin(pid_t pid, struct kc_result *result)
{
    if (ptrace(PTRACE_SEIZE, pid, NULL, NULL) != 0)
        return kc_fail_errno(result, KC_INTERNAL, errno, "The main thread cannot be held");
    double start = io_now();
    bool interrupted = false;
    while (io_now() - start < patience) {
        int status;
        pid_t got = waitpid(pid, &status, WNOHANG | __WALL);
        if (got == pid && WIFSTOPPED(status) && status >> 16 == PTRACE_EVENT_STOP)
            return true;
        if (got == pid && WIFSTOPPED(status)) {
            /* A signal on its way: let it pass and ask for a stop again. */
            ptrace(PTRACE_CONT, pid, NULL, (void *)(long)WSTOPSIG(status));
            interrupted = false;
            continue;
        }
        if (got == pid || (got < 0 && errno != EINTR))
            return kc_fail(result, KC_CRIU_FAILED, "The restored process ended at once.");
        if (!interrupted && io_now() - start > 0.05) {
            interrupted = true;
            ptrace(PTRACE_INTERRUPT, pid, NULL, NULL);
        }
        io_sleep_ms(1);
    }
    hold_end(pid);
    return kc_fail(result, KC_TIMEOUT, "The main thread did not stop to be held.");
}

void hold_end(pid_t pid)
{
    if (ptrace(PTRACE_DETACH, pid, NULL, NULL) != 0 && errno != ESRCH)
        kc_log("detach: errno %d", errno);
}
