import { CodeCell } from '@jupyterlab/cells';

import type { KernelStateAPI } from '../api';
import { OperationFollower } from '../follower';
import type { IKernelPage } from '../pages';
import { PendingRequests } from '../pending';
import { anOperation, settle } from './fixtures';

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

    pending.abandonUnknown('K1', 'S1', 'm1');
    expect(running.future.dispose).not.toHaveBeenCalled();
    expect(queued.future.dispose).not.toHaveBeenCalled();
    expect(later.future.dispose).toHaveBeenCalledTimes(1);
    // Output of its threads may still come.
    expect(finished.future.dispose).not.toHaveBeenCalled();
  });

  it('keeps only the running request of a state it did not see saved', () => {
    pending.abandonUnknown('K1', 'S2', 'm1');
    expect(running.future.dispose).not.toHaveBeenCalled();
    expect(queued.future.dispose).toHaveBeenCalledTimes(1);
  });
});
