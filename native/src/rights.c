/* SPDX-License-Identifier: BSD-3-Clause */
#include "rights.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "caps.h"
#include "io.h"
#include "procfs.h"

/* Root may take anybody's. */
static bool is_foreign(const struct proc_status *status)
{
    bool foreign = false;
    for (int k = 0; k < 4; k++)
        foreign = foreign || status->uid[k] != getuid();
    return foreign && getuid() != 0;
}

bool rights_collect(struct tree *tree, pid_t root, struct kc_result *result)
{
    if (!tree_collect(tree, root, true))
        return kc_fail(result, KC_NO_PROCESS, "There is no process %d.", root);
    if (tree->tasks[0].state == 'Z')
        return kc_fail(result, KC_NO_PROCESS, "Process %d has ended.", root);
    for (size_t i = 0; i < tree->count; i++) {
        struct proc_status status;
        pid_t pid = tree->tasks[i].pid;
        if (!proc_status(pid, &status)) {
            if (i == 0)
                return kc_fail(result, KC_NO_PROCESS, "There is no process %d.", pid);
            continue;
        }
        if (is_foreign(&status))
            return kc_fail(result, KC_NOT_YOURS, "Process %d belongs to another user.", pid);
    }
    return true;
}

/* A process that may have fewer capabilities than the caller's other processes starts set-user-ID
 * programs that cannot give up their rights. An ordinary user cannot make one. */
static bool is_bounded(const struct proc_status *status)
{
    struct proc_status own;
    return !caps_root() && !status->no_new_privs &&
           (!proc_status(getpid(), &own) || (own.cap_bnd & ~status->cap_bnd) != 0);
}

/* Whether a thread of a live process, by its number, has rights or user ids that the caller has not. */
static bool thread_has_too_much(pid_t tid)
{
    uint64_t most = caps_callers_own();
    struct proc_stat stat;
    struct proc_status status;
    if (!proc_stat(tid, &stat) || stat.state == 'Z' || stat.state == 'X' ||
        !proc_status(tid, &status))
        return false;
    return ((status.cap_prm | status.cap_eff | status.cap_amb) & ~most) != 0 ||
           (status.cap_inh & ~caps_callers_inheritable()) != 0 || is_bounded(&status) ||
           is_foreign(&status);
}

/* Each thread has rights and user ids of its own, and images may say anything of each. */
static bool has_too_much(pid_t pid)
{
    DIR *dir = proc_dir(pid, "task");
    if (dir == NULL)
        return errno != ENOENT && errno != ESRCH; /* else it has ended */
    bool found = false;
    for (const struct dirent *entry; !found && (entry = readdir(dir)) != NULL;)
        found = isdigit((unsigned char)entry->d_name[0]) != 0 &&
                thread_has_too_much((pid_t)strtol(entry->d_name, NULL, 10));
    closedir(dir);
    return found;
}

bool rights_check(const struct tree *tree, struct kc_result *result)
{
    double deadline = io_now() + 1.0;
    for (size_t i = 0; i < tree->count; i++)
        /* A process of CRIU's own, on its way out, may be among them for a moment. */
        while (has_too_much(tree->tasks[i].pid)) {
            if (io_now() >= deadline)
                return kc_fail(result, KC_NOT_YOURS,
                               "Process %d of the state has other rights than the caller.",
                               tree->tasks[i].pid);
            io_sleep_ms(5);
        }
    return true;
}
