/* SPDX-License-Identifier: BSD-3-Clause */
/* The GPU's part of a transaction alone: its memory goes to host memory and stays there, or comes back.
 * CRIU has no part in it, and no capability is needed. */
#include "park.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "cuda.h"
#include "io.h"
#include "json.h"
#include "procfs.h"
#include "tree.h"

struct park {
    struct kc_result result;
    struct tree tree;
    struct cuda cuda;
    struct io_lines lines;
    int signals;
    double deadline;
    bool unwanted, late;
};

static bool wait_for(void *data, int fd, int most)
{
    struct park *park = data;
    struct pollfd fds[3] = {{.fd = fd, .events = POLLIN},
                            {.fd = park->signals, .events = POLLIN},
                            {.fd = park->lines.eof ? -1 : STDIN_FILENO, .events = POLLIN}};
    poll(fds, 3, park->late ? most : io_until(park->deadline, most));
    park->late = !park->unwanted && io_now() >= park->deadline;
    if (fds[1].revents != 0)
        park->unwanted = true;
    if (fds[2].revents != 0) {
        io_fill(&park->lines, STDIN_FILENO);
        for (enum io_command command; (command = io_next(&park->lines)) != IO_NONE;) {
            if (command == IO_CANCEL || command == IO_KILL || command == IO_EOF)
                park->unwanted = true;
            if (command == IO_EOF)
                break;
        }
    }
    return !park->unwanted && !park->late;
}

static bool listen_to_signals(struct park *park)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGCHLD, SIG_DFL);
    if (sigprocmask(SIG_BLOCK, &set, NULL) != 0 ||
        (park->signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK)) < 0)
        return kc_fail_errno(&park->result, KC_INTERNAL, errno, "signalfd");
    return true;
}

/* The root must be there; all of the tree must be the caller's, unless root asks. */
static bool examine(struct park *park, pid_t pid)
{
    if (!tree_collect(&park->tree, pid, true) || park->tree.tasks[0].state == 'Z')
        return kc_fail(&park->result, KC_NO_PROCESS, "There is no process %d.", pid);
    for (size_t i = 0; i < park->tree.count; i++) {
        struct proc_status status;
        if (!proc_status(park->tree.tasks[i].pid, &status))
            continue;
        for (int k = 0; k < 4; k++)
            if (status.uid[k] != getuid() && getuid() != 0)
                return kc_fail(&park->result, KC_NOT_YOURS, "Process %d belongs to another user.",
                               park->tree.tasks[i].pid);
    }
    return true;
}

static bool move(struct park *park, const struct args *args)
{
    if (!cuda_begin(&park->cuda, &park->tree, args, wait_for, park, &park->result))
        return false;
    if (args->command == ARGS_UNPARK)
        return cuda_unpark(&park->cuda, &park->result);
    if (!cuda_freeze(&park->cuda, &park->result)) {
        if (park->late && park->result.reason == KC_CANCELLED) {
            park->result = (struct kc_result){.reason = KC_OK};
            kc_fail(&park->result, KC_TIMEOUT, "It took too long; the kernel runs on.");
        }
        return false;
    }
    cuda_leave(&park->cuda);
    return true;
}

int park_command(const struct args *args)
{
    static struct json json;
    struct park park = {.signals = -1, .cuda = {.helper = -1, .socket = -1}};
    park.deadline = io_now() + args->timeout;
    bool done = listen_to_signals(&park) && examine(&park, args->pid) && move(&park, args);
    tree_free(&park.tree);
    if (!done) {
        event_error(&park.result);
        return 1;
    }
    json_begin(&json, "done");
    cuda_record(&park.cuda, &json);
    json_send(&json, 5000);
    return 0;
}
