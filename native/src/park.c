/* SPDX-License-Identifier: BSD-3-Clause */
/* The GPU's part of a transaction alone: its memory goes to host memory and stays there, or comes back.
 * CRIU has no part in it, and no capability is needed. */
#include "park.h"

#include <errno.h>

#include "cuda.h"
#include "io.h"
#include "json.h"
#include "rights.h"
#include "tree.h"

struct park {
    struct kc_result result;
    struct tree tree;
    struct cuda cuda;
    struct io_caller caller;
    double deadline;
    bool unwanted, late;
};

static bool wait_for(void *data, int fd, int most)
{
    struct park *park = data;
    int wait = park->late ? most : io_until(park->deadline, most);
    if (io_listen(&park->caller, fd, wait) == IO_CANCEL)
        park->unwanted = true;
    park->late = !park->unwanted && io_now() >= park->deadline;
    return !park->unwanted && !park->late;
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
    struct park park = {.caller = {.signals = -1}, .cuda = {.helper = -1, .socket = -1}};
    park.deadline = io_now() + args->timeout;
    bool done = io_hear(&park.caller)
                    ? rights_collect(&park.tree, args->pid, &park.result) && move(&park, args)
                    : kc_fail_errno(&park.result, KC_INTERNAL, errno, "signalfd");
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
