import { CodeCell } from '@jupyterlab/cells';

import type { KernelStateAPI } from '../api';
import type { IKernelEvent } from '../events';
import { OperationFollower } from '../follower';
import type { IKernelPage } from '../pages';
import { PendingRequests } from '../pending';
import { aRestore, anOperation, settle } from './fixtures';

/** A code cell that waits for a request's reply, or not. */
function cell(msg_id: string, running: boolean) {
  const future = {
    isDisposed: false,
    msg: { header: { msg_id } },
    dispose: jest.fn()
  };
  const widget = Object.create(CodeCell.prototype, {
    model: { value: { executionState: running ? 'running' : 'idle' } },
    outputArea: { value: { future } }
  });
  return { widget, future };
}

function pageOf(cells: ReturnType<typeof cell>[]): IKernelPage {
  return {
    cells: cells.map(({ widget }) => widget),
    sessionContext: { session: null }
  } as unknown as IKernelPage;
}

function restored(state_id: string, held_msg_ids: string[] = []): IKernelEvent {
  return aRestore({ state_id, in_flight_msg_id: 'm1', held_msg_ids });
}

describe('PendingRequests', () => {
  const finished = cell('m0', false);
  const running = cell('m1', true);
  const queued = cell('m2', true);
  const later = cell('m3', true);
  const cells = [finished, running, queued];
  const pending = new PendingRequests(() => [pageOf(cells)]);

  it('keeps what the state knows and abandons what came later', async () => {
    const api = {} as KernelStateAPI;
    const follower = new OperationFollower(
      anOperation({ status: 'done', state_id: 'S1' }),
      api
    );
    pending.onOperationStarted(follower);
    await settle();
    cells.push(later);

    pending.abandonUnknown(restored('S1'));
    expect(running.future.dispose).not.toHaveBeenCalled();
    expect(queued.future.dispose).not.toHaveBeenCalled();
    expect(later.future.dispose).toHaveBeenCalledTimes(1);
    // Output of its threads may still come.
    expect(finished.future.dispose).not.toHaveBeenCalled();
  });

  it('takes a park for no save', () => {
    const done = jest.fn();
    const operation = anOperation({ kind: 'park' });
    const follower = { operation, done: { then: done } };
    pending.onOperationStarted(follower as unknown as OperationFollower);
    expect(done).not.toHaveBeenCalled();
  });

  it('keeps only the running request of a state it did not see saved', () => {
    pending.abandonUnknown(restored('S2'));
    expect(running.future.dispose).not.toHaveBeenCalled();
    expect(queued.future.dispose).toHaveBeenCalledTimes(1);
  });

  it('keeps what was sent while the kernel was restored', () => {
    const [old, held, sent] = ['m4', 'm5', 'm6'].map(id => cell(id, true));
    cells.splice(0, cells.length, old, held);
    const api = {} as KernelStateAPI;
    const operation = anOperation({ kind: 'restore', state_id: 'S1' });
    const follower = new OperationFollower(operation, api);
    pending.onOperationStarted(follower);
    // Sent before this page heard of the restore, and after that.
    cells.push(sent);
    pending.abandonUnknown(restored('S1', ['m5']));
    expect(old.future.dispose).toHaveBeenCalledTimes(1);
    expect(held.future.dispose).not.toHaveBeenCalled();
    expect(sent.future.dispose).not.toHaveBeenCalled();
    follower.dispose();
  });
});
