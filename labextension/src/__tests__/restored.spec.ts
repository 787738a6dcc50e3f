import { CodeCell } from '@jupyterlab/cells';
import type { ServerConnection } from '@jupyterlab/services';
import { nullTranslator } from '@jupyterlab/translation';
import { Signal } from '@lumino/signaling';

import type { IKernel, IRestoredFrom } from '../api';
import type { Notices } from '../notices';
import type { IKernelPage, KernelPages } from '../pages';
import { RequestError } from '../request';
import { RestoredKernels } from '../restored';
import {
  KERNEL,
  Running,
  Server,
  aKernel,
  aRestore,
  aRestoredFrom,
  anError,
  settle
} from './fixtures';

const trans = nullTranslator.load('jupyter_gpu_ckpt');

/** A code cell that was run with a request. */
function cell(msg_id: string): CodeCell {
  const future = {
    isDisposed: true,
    msg: { header: { msg_id } },
    dispose: jest.fn()
  };
  return Object.create(CodeCell.prototype, {
    isDisposed: { value: false },
    model: { value: { executionState: 'idle' } },
    outputArea: { value: { future } }
  });
}

describe('RestoredKernels', () => {
  const server = new Server();
  const notices = { cameBack: jest.fn(), hasTold: jest.fn(() => false) };
  const forget = jest.fn();
  const notWoken = jest.fn();
  const error = jest.fn();
  const model = server.model();
  const running = new Running();
  const cells = ['m1', 'm2', 'm3'].map(cell);
  const kernelChanged = new Signal<object, void>({});
  const session = {
    kernel: { id: 'fresh', requestKernelInfo: async () => undefined }
  };
  const page = {
    cells,
    sessionContext: { session, kernelChanged },
    run: jest.fn(async () => undefined)
  };
  const of = (wanted: boolean) =>
    wanted ? [page as unknown as IKernelPage] : [];
  new RestoredKernels({
    everywhere: true,
    kernels: running.manager,
    model,
    notices: {
      restores: notices,
      error,
      forget,
      notWoken
    } as unknown as Notices,
    pages: {
      ofKernel: (id: string) => of(id === session.kernel.id),
      ofPath: (path: string) => of(path === 'a.ipynb')
    } as KernelPages,
    serverSettings: {} as ServerConnection.ISettings,
    trans
  });

  function getKernel(id: string): void {
    session.kernel.id = id;
    kernelChanged.emit();
  }

  function restored(path: string, held_msg_ids: string[]): void {
    server.say(KERNEL, aRestore({ path, cause: 'lost', held_msg_ids }));
  }

  it('runs what was kept from a fresh kernel once the page has the restored one', () => {
    restored('b.ipynb', ['m1']);
    restored('a.ipynb', ['m9']);
    restored('a.ipynb', ['m3', 'm2']);
    getKernel('another');
    expect(page.run).not.toHaveBeenCalled();
    getKernel('K1');
    // In the order in which they were run.
    expect(page.run.mock.calls).toEqual([[[cells[2], cells[1]]]]);
    getKernel('K1');
    expect(page.run).toHaveBeenCalledTimes(1);
  });

  it('tells once what did not come back, also when the page is loaded anew', async () => {
    const warnings = ['Did not come back: connection to 10.0.0.5:5432.'];
    const told = async (change: Partial<IRestoredFrom>) => {
      notices.cameBack.mockClear();
      server.kernel.mockResolvedValue(
        aKernel({
          restored_from: aRestoredFrom({ cause: 'wake', warnings, ...change })
        })
      );
      await model.refresh('K1');
      return notices.cameBack.mock.calls.length;
    };
    expect(await told({})).toBe(1);
    expect(await told({})).toBe(0);
    // A death has its own notice, and what the user asked for is told with that.
    expect(await told({ restored: '1', cause: 'death' })).toBe(0);
    expect(await told({ restored: '2', cause: 'user' })).toBe(0);
    expect(await told({ restored: '3', warnings: [] })).toBe(0);
    notices.hasTold.mockReturnValueOnce(true);
    expect(await told({ restored: '4', cause: 'lost' })).toBe(0);
    expect(await told({ restored: '4', cause: 'lost' })).toBe(0);
    expect(await told({ restored: '5', cause: 'lost' })).toBe(1);
  });

  it('takes back that a kernel could not be restored', () => {
    forget.mockClear();
    restored('a.ipynb', []);
    expect(forget.mock.calls).toEqual([['restore K1']]);
  });

  it('leaves to the server what was kept for the kernel itself', () => {
    restored('a.ipynb', ['m1']);
    getKernel('K1');
    expect(page.run).toHaveBeenCalledTimes(1);
  });

  it('tells that a kernel did not wake, where no cell of the page does', async () => {
    getKernel('K1');
    const failure = anError({ reason: 'restore_failed' });
    const asleep = aKernel({ execution_state: 'hibernated', error: failure });
    const read = async (kernel: IKernel) => {
      server.kernel.mockResolvedValue(kernel);
      await model.refresh('K1');
      return notWoken.mock.calls.length;
    };
    const failed = async (held_msg_ids: string[]) => {
      const action = 'restore_failed';
      server.say(KERNEL, aRestore({ action, cause: 'wake', held_msg_ids }));
      await settle();
      return notWoken.mock.calls.length;
    };
    const quiet = aKernel({ execution_state: 'hibernated', error: anError() });
    expect(await read(quiet)).toBe(0);
    // Also where the page came too late to hear of it.
    expect(await read(asleep)).toBe(1);
    expect(notWoken).toHaveBeenLastCalledWith('K1', failure);
    expect(await read(asleep)).toBe(1);
    // Each try is told, except to whom a cell says it.
    expect(await failed([])).toBe(2);
    expect(await failed(['of another page'])).toBe(3);
    forget.mockClear();
    expect(await failed(['m2'])).toBe(3);
    expect(forget.mock.calls).toEqual([['restore K1']]);
    expect(await read(aKernel())).toBe(3);
    expect(await read(asleep)).toBe(4);
  });

  describe('that a kernel did not wake', () => {
    const taken = () => forget.mock.calls.flat();
    const asleep = aKernel({
      execution_state: 'hibernated',
      error: anError({ reason: 'restore_failed' })
    });
    const refuse = async (reason: string) => {
      const error = new RequestError(404, anError({ reason }));
      server.kernel.mockRejectedValue(error);
      await model.refresh('K1');
    };

    beforeEach(async () => {
      server.kernel.mockResolvedValue(aKernel());
      await model.refresh('K1');
      server.kernel.mockResolvedValue(asleep);
      await model.refresh('K1');
      notWoken.mockClear();
      forget.mockClear();
    });

    it('is taken back once it is another process, also unseen', async () => {
      running.are('K1');
      await settle();
      expect(taken()).toEqual([]);
      server.kernel.mockResolvedValue(aKernel());
      running.are('K1');
      await settle();
      expect(taken()).toEqual(['restore K1']);
      await model.refresh('K1');
      expect(taken()).toEqual(['restore K1']);
    });

    it('is taken back once it is none', async () => {
      await refuse('unreachable');
      expect(taken()).toEqual([]);
      await refuse('unknown_kernel');
      expect(taken()).toEqual(['restore K1']);
    });

    it('is taken back once the server does not list it', () => {
      running.are('K2');
      expect(taken()).toEqual(['restore K1']);
    });

    it('does not take with it that another server has it', async () => {
      server.say(KERNEL, aRestore({ action: 'fenced', cause: null }));
      await refuse('unknown_kernel');
      expect(taken()).toEqual([]);
    });
  });

  it.each([true, false])(
    'reads later whether a kernel woke, while a page shows it (%s)',
    async isShown => {
      jest.useFakeTimers();
      try {
        const id = `asleep ${isShown}`;
        getKernel(id);
        const asleep = aKernel({ id, execution_state: 'hibernated' });
        server.kernel.mockResolvedValue(asleep);
        await model.refresh(id);
        if (!isShown) {
          getKernel('another');
          model.forget(id);
        }
        server.kernel.mockClear();
        jest.advanceTimersByTime(10_000);
        expect(server.kernel).toHaveBeenCalledTimes(isShown ? 1 : 0);
        await settle();
        expect(model.entry(id).kernel).toBe(isShown ? asleep : null);
      } finally {
        jest.useRealTimers();
      }
    }
  );

  it('tells that another server has taken the kernel over', () => {
    const message = 'It was taken over by node-b.';
    const about = 'restore K1';
    server.say(KERNEL, aRestore({ action: 'fenced', cause: null, message }));
    expect(error).toHaveBeenLastCalledWith(
      'Kernel Taken Over',
      expect.objectContaining({ message, hint: expect.any(String) }),
      { about }
    );
  });
});
