import type { CodeCell } from '@jupyterlab/cells';
import type { NotebookPanel } from '@jupyterlab/notebook';
import { NotebookActions } from '@jupyterlab/notebook';
import { nullTranslator } from '@jupyterlab/translation';
import { Signal } from '@lumino/signaling';

import type { IRestoredFrom } from '../api';
import { Gaps } from '../gaps';
import type { KernelStates } from '../model';
import type { IGapActions, RestoreNotices } from '../restorenotices';
import type { KernelPages } from '../pages';
import { KERNEL, Server, aKernel, aRestoredFrom, settle } from './fixtures';

const trans = nullTranslator.load('jupyter_gpu_ckpt');

/** A code cell of an open notebook. */
class OpenCell {
  constructor(
    id: string,
    public executionCount: number | null
  ) {
    this.model = Object.create(null, {
      type: { value: 'code' },
      id: { value: id },
      executionCount: { get: () => this.executionCount },
      sharedModel: { value: { getSource: () => id } },
      getMetadata: { value: () => undefined },
      stateChanged: { value: this.stateChanged }
    });
  }

  addClass(name: string): void {
    this.node.classList.add(name);
  }

  removeClass(name: string): void {
    this.node.classList.remove(name);
  }

  get isMarked(): boolean {
    return this.node.textContent!.startsWith('Undone: ran after');
  }

  run(count: number): void {
    this.executionCount = count;
    this.stateChanged.emit({ name: 'executionCount', newValue: count });
  }

  remove(): void {
    this.isDisposed = true;
    this.disposed.emit();
  }

  readonly disposed = new Signal<object, void>({});
  isDisposed = false;
  readonly model: object;
  readonly node = document.createElement('div');
  readonly ready = Promise.resolve();
  readonly stateChanged = new Signal<
    object,
    { name: string; newValue: unknown }
  >({});
}

describe('Gaps', () => {
  let server: Server;
  let model: KernelStates;
  let cells: OpenCell[];
  let history: jest.Mock;
  let context: {
    session: { kernel: { id: string; requestHistory: jest.Mock } };
    kernelChanged: Signal<object, { newValue: { id: string } | null }>;
    statusChanged: Signal<object, string>;
  };
  let panel: NotebookPanel;
  /** What is said: the text, or nothing. */
  let told: string | null;
  let actions: IGapActions;

  /** The kernel was restored, and its notebook looked at. */
  async function restored(change: Partial<IRestoredFrom> = {}): Promise<void> {
    server.kernel.mockResolvedValue(
      aKernel({ restored_from: aRestoredFrom(change) })
    );
    server.say(KERNEL, { action: 'restored', kernel_id: 'K1' });
    await settle();
    await settle();
  }

  function marked(): boolean[] {
    return cells.map(cell => cell.isMarked);
  }

  /** What the kernel says that it has executed. */
  function executed(lines: [number, string][]): object {
    const found = lines.map(([count, source]) => [0, count, source]);
    return { content: { status: 'ok', history: found } };
  }

  function open(): void {
    new Gaps({
      model,
      notices: {
        gap: (_: string, text: string, can: IGapActions, isNew: boolean) => {
          told = isNew || told !== null ? text : null;
          actions = can;
        },
        gapClosed: () => {
          told = null;
        }
      } as unknown as RestoreNotices,
      pages: {
        notebooks: (id: string) =>
          id === context.session.kernel.id ? [panel] : [],
        notebooksOf: () => [panel],
        forEachContext: (callback: (found: typeof context) => void) =>
          callback(context)
      } as unknown as KernelPages,
      trans
    });
  }

  beforeEach(() => {
    jest.useFakeTimers();
    window.localStorage.clear();
    server = new Server();
    model = server.model();
    cells = [new OpenCell('a', 1), new OpenCell('b', 3), new OpenCell('c', 2)];
    history = jest.fn(async () => executed([]));
    context = {
      session: { kernel: { id: 'K1', requestHistory: history } },
      kernelChanged: new Signal({}),
      statusChanged: new Signal({})
    };
    panel = {
      context: { ready: Promise.resolve() },
      sessionContext: context,
      content: { widgets: cells },
      isDisposed: false
    } as unknown as NotebookPanel;
    told = null;
    open();
  });

  afterEach(() => {
    model.dispose();
    jest.restoreAllMocks();
    jest.useRealTimers();
  });

  it('are marked and told of, and go cell by cell as they are run', async () => {
    await restored();
    expect(marked()).toEqual([false, true, true]);
    expect(told).toContain('2 cells ran after that.');
    cells[2].run(2);
    expect(marked()).toEqual([false, true, false]);
    expect(told).toContain('one cell ran after that.');
    cells[1].remove();
    expect(told).toBeNull();
  });

  it('are not told of where nothing ran after the save', async () => {
    await restored({ execution_count: 3 });
    expect(marked()).toEqual([false, false, false]);
    expect(told).toBeNull();
    expect(history).not.toHaveBeenCalled();
  });

  it('leave out what the kernel has run since, also where it says so late', async () => {
    let answer: (reply: object) => void = () => undefined;
    history.mockReturnValue(new Promise(resolve => (answer = resolve)));
    await restored();
    // It may be in the middle of a long cell.
    expect(told).toBeNull();
    jest.advanceTimersByTime(2000);
    await settle();
    expect(told).toContain('2 cells');
    answer(executed([[2, 'c']]));
    await settle();
    expect(marked()).toEqual([false, true, false]);
    expect(told).toContain('one cell');
  });

  it('are shown all the same where the kernel does not tell', async () => {
    history.mockRejectedValue(new Error('no history'));
    await restored();
    expect(told).toContain('2 cells');
  });

  it('are looked for once for each restore', async () => {
    await restored();
    cells[1].run(2);
    cells[2].run(3);
    await restored();
    expect(told).toBeNull();
    expect(history).toHaveBeenCalledTimes(1);
    await restored({ restored: '2026-12-02T17:00:00Z' });
    expect(history).toHaveBeenCalledTimes(2);
    expect(told).toContain('2 cells');
  });

  it('stay dismissed, on this page and on later ones', async () => {
    await restored();
    actions.dismiss();
    expect([told, ...marked()]).toEqual([null, false, false, false]);
    // Loaded anew.
    model.dispose();
    model = server.model();
    panel = { ...panel } as NotebookPanel;
    open();
    await restored();
    expect(told).toBeNull();
    await restored({ restored: '2026-12-02T17:00:00Z' });
    expect(told).toContain('2 cells');
  });

  it('outlive hibernation, and so does that they were dismissed', async () => {
    await restored();
    await restored({ cause: 'wake', restored: '2026-12-02T17:00:00Z' });
    expect(history).toHaveBeenCalledTimes(1);
    expect(marked()).toEqual([false, true, true]);
    actions.dismiss();
    await restored({ cause: 'wake', restored: '2026-12-02T18:00:00Z' });
    expect([told, ...marked()]).toEqual([null, false, false, false]);
  });

  it.each<[string, () => void]>([
    ['restarted', () => context.statusChanged.emit('autorestarting')],
    [
      'changed for another',
      () => context.kernelChanged.emit({ newValue: { id: 'K2' } })
    ],
    ['shut down', () => context.kernelChanged.emit({ newValue: null })]
  ])('go when the kernel is %s', async (_, happens) => {
    await restored();
    expect(told).not.toBeNull();
    happens();
    expect([told, ...marked()]).toEqual([null, false, false, false]);
  });

  it('go when another page has started the kernel empty', async () => {
    await restored();
    server.kernel.mockResolvedValue(aKernel({ restored_from: null }));
    await model.refresh('K1');
    expect([told, ...marked()]).toEqual([null, false, false, false]);
  });

  it('are not shown in a notebook that got another kernel meanwhile', async () => {
    let answer: (reply: object) => void = () => undefined;
    history.mockReturnValue(new Promise(resolve => (answer = resolve)));
    await restored();
    context.session.kernel.id = 'K2';
    context.kernelChanged.emit({ newValue: { id: 'K2' } });
    answer(executed([]));
    await settle();
    expect([told, ...marked()]).toEqual([null, false, false, false]);
  });

  it('are run again in the order in which they ran, once at a time', async () => {
    let end: (done: boolean) => void = () => undefined;
    const run = jest
      .spyOn(NotebookActions, 'runCells')
      .mockReturnValue(new Promise(resolve => (end = resolve)));
    await restored();
    actions.runAgain();
    actions.runAgain();
    expect(run).toHaveBeenCalledTimes(1);
    const [content, found, session] = run.mock.calls[0];
    expect(found).toEqual([cells[2], cells[1]] as unknown as CodeCell[]);
    expect([content, session]).toEqual([panel.content, context]);
    end(true);
    await settle();
    actions.runAgain();
    expect(run).toHaveBeenCalledTimes(2);
  });
});
