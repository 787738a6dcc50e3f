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
    enum kc_reason undo; /* why it is given up, KC_OK when it is not */
};

static bool wait_for(void *data, int fd, int most)
{
    struct park *park = data;
    bool wanted = park->undo == KC_OK;
    if (io_listen(&park->caller, fd, wanted ? io_until(park->deadline, most) : most) == IO_CANCEL &&
        wanted)
        park->undo = KC_CANCELLED;
    else if (wanted && io_now() >= park->deadline)
        park->undo = KC_TIMEOUT;
    return park->undo == KC_OK;
}

/* False. Says why it was given up. */
static bool given_up(struct park *park)
{
    return kc_fail(&park->result, park->undo, "%s; the kernel runs on.",
                   park->undo == KC_TIMEOUT ? "It took too long" : "It was cancelled");
}

static bool move(struct park *park, const struct args *args)
{
    if (!cuda_begin(&park->cuda, &park->tree, args, wait_for, park, &park->result))
        return false;
    if (args->command == ARGS_UNPARK)
        return cuda_unpark(&park->cuda, &park->result);
    if (!cuda_freeze(&park->cuda, &park->result)) {
        if (park->result.reason != KC_CANCELLED || park->undo == KC_OK)
            return false;
        park->result = (struct kc_result){.reason = KC_OK};
        return given_up(park);
    }
    /* Whoever gave it up while the last memory was copied is not there to unpark it. */
    if (park->undo != KC_OK) {
        cuda_thaw(&park->cuda);
        return park->cuda.problem.reason == KC_OK
                   ? given_up(park)
                   : kc_fail(&park->result, park->cuda.problem.reason, "%s",
                             park->cuda.problem.message);
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
