import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Notification } from '@jupyterlab/apputils';
import { nullTranslator } from '@jupyterlab/translation';
import { CommandRegistry } from '@lumino/commands';

import { Actions } from '../actions';
import type { IOperation, IParked, KernelStateAPI } from '../api';
import { addCommands, CommandIDs } from '../commands';
import { faceOf } from '../face';
import type { LostKernels } from '../lost';
import type { KernelStates } from '../model';
import { Notices } from '../notices';
import { UnaskedParks } from '../unasked';
import {
  Running,
  Server,
  aKernel,
  aResult,
  anError,
  anOperation,
  settle
} from './fixtures';

const trans = nullTranslator.load('');

function aParked(change: Partial<IParked> = {}): IParked {
  return {
    since: '2026-12-02T15:00:00Z',
    host_bytes: 2_000_000_000,
    position: null,
    waiting: null,
    ...change
  };
}

function aMove(change: Partial<IOperation> = {}): IOperation {
  const result = aResult({ state_id: '', size: 2_000_000_000 });
  return anOperation({ kind: 'park', status: 'done', result, ...change });
}

describe('The face of a parked kernel', () => {
  function face(parked: IParked | null, operation: IOperation | null = null) {
    return faceOf(
      { kernel: aKernel({ parked }), error: null, operation },
      trans
    );
  }

  it('says so, and how much is in host memory', () => {
    const { state, label, title } = face(aParked());
    expect([state, label]).toEqual(['parked', 'Parked']);
    expect(title).toContain('2 GB in host memory');
  });

  it('says what a cell waits for', () => {
    const waiting = anOperation({ kind: 'unpark', phase: 'waiting' });
    const third = face(aParked({ position: 3 }), waiting);
    expect(third.label).toBe('Waits for GPU, no. 3 in line');
    expect(third.title).toBe(
      'GPU parked; waits for the GPU after 2 other kernels (click to cancel)'
    );
    expect(face(aParked({ position: 2 }), waiting).title).toContain(
      'after one other kernel'
    );
    expect(face(aParked({ position: 1 }), waiting).label).toBe('Waits for GPU');
    expect(face(aParked({ position: 1 }), waiting).title).toContain(
      'waits for room on the GPU'
    );
    const moving = { ...waiting, phase: 'moving' };
    const back = face(aParked({ position: 1 }), moving);
    expect([back.label, back.title]).toEqual([
      'Unparking…',
      'Unparking GPU… (click to cancel)'
    ]);
    const away = face(null, anOperation({ kind: 'park', phase: 'moving' }));
    expect(away.label).toBe('Parking…');
    const works = face(null, anOperation({ kind: 'park', phase: 'gpu' }));
    expect([works.label, works.title]).toEqual([
      'Waits for GPU',
      'Waiting for the GPU to finish its work (1 s) (click to cancel)'
    ]);
  });
});

describe('Parking', () => {
  let server: Server;
  let model: KernelStates;
  let actions: Actions;
  const park = jest.fn(async () => aMove());
  const unpark = jest.fn(async () => aMove({ kind: 'unpark' }));
  const save = jest.fn();
  const commands = new CommandRegistry();

  const state = (command: string, args = {}) => [
    commands.isVisible(command, args),
    commands.isEnabled(command, args)
  ];

  beforeEach(() => {
    jest.useFakeTimers();
    jest.clearAllMocks();
    server = new Server();
    model = server.model();
    const api = { park, unpark, save } as unknown as KernelStateAPI;
    actions = new Actions({
      api,
      model,
      notices: new Notices(api, trans),
      trans
    } as unknown as Actions.IOptions);
  });

  afterEach(() => {
    Notification.dismiss();
    model.dispose();
    jest.useRealTimers();
  });

  function said(): string[] {
    jest.advanceTimersByTime(1000);
    return Notification.manager.notifications.map(
      ({ type, message }) => `${type} | ${message}`
    );
  }

  it('is offered for what can be parked, and undone for what is', async () => {
    const context = { path: 'a.ipynb', session: { kernel: { id: 'K1' } } };
    const item = { dataset: { context: 'K2' } };
    const app = {
      commands,
      contextMenuHitTest: () => item,
      shell: { currentWidget: { sessionContext: context } }
    } as unknown as JupyterFrontEnd;
    const lost = {} as LostKernels;
    addCommands({ actions, app, lost, model, palette: null, trans });

    await model.refresh('K1');
    expect(state(CommandIDs.park)).toEqual([true, true]);
    expect(state(CommandIDs.unpark)).toEqual([false, false]);

    server.kernel.mockResolvedValue(aKernel({ parked: aParked() }));
    await model.refresh('K1');
    expect(state(CommandIDs.park)).toEqual([false, false]);
    expect(state(CommandIDs.unpark)).toEqual([true, true]);

    for (const change of [
      { execution_state: 'hibernated' },
      { savable: false }
    ]) {
      server.kernel.mockResolvedValue(aKernel(change));
      await model.refresh('K1');
      expect(state(CommandIDs.park)).toEqual([true, false]);
      expect(state(CommandIDs.unpark)).toEqual([false, false]);
    }

    // No page shows it: the server says whether it is parked.
    const args = { runningPanel: true };
    expect(state(CommandIDs.park, args)).toEqual([true, true]);
    expect(state(CommandIDs.unpark, args)).toEqual([true, true]);
    await commands.execute(CommandIDs.unpark, args);
    expect(unpark).toHaveBeenCalledWith('K2');
    context.session.kernel.id = '';
    expect(state(CommandIDs.park)).toEqual([false, false]);

    // A node without a GPU: nothing of it is seen.
    context.session.kernel.id = 'K1';
    server.kernel.mockResolvedValue(aKernel({ can_park: false }));
    await model.refresh('K1');
    for (const command of [CommandIDs.park, CommandIDs.unpark]) {
      expect(state(command)[0]).toBe(false);
      expect(state(command, args)[0]).toBe(false);
    }
  });

  it.each([
    ['park', 'gpu', 'Waiting for the GPU to finish its work (1 s)'],
    ['unpark', 'waiting', 'Waiting for room on the GPU…'],
    ['unpark', 'moving', 'Unparking GPU… 50%']
  ] as const)(
    'says what a %s waits for, in phase %s',
    async (kind, phase, words) => {
      await model.refresh('K1');
      const begun = aMove({ kind, status: 'running', progress: 0 });
      const move = kind === 'park' ? park : unpark;
      move.mockResolvedValue(begun);
      const doing = actions[kind]('K1');
      await settle();
      const [{ id }] = Notification.manager.notifications;
      const drawn = Object.assign(document.createElement('div'), { id });
      document.body.append(drawn);
      server.sayOperation({ kind, phase, progress: 0.5 });
      await settle();
      expect(said()).toEqual([`in-progress | ${words}`]);
      server.operation.mockResolvedValue(aMove({ kind }));
      server.sayOperation({ kind, status: 'done' });
      await doing;
      drawn.remove();
      move.mockImplementation(async () => aMove({ kind }));
    }
  );

  it('says how it went', async () => {
    await actions.park('K1');
    expect(said()).toEqual(['success | GPU parked (2 GB in 1.2 s)']);
    // One notice: what was said before counts no longer.
    await actions.unpark('K1');
    expect(said()).toEqual(['success | GPU unparked (2 GB in 1.2 s)']);
  });

  it('ends with a click on the button', async () => {
    server.kernel.mockResolvedValue(aKernel({ parked: aParked() }));
    await model.refresh('K1');
    await actions.click('K1', faceOf(model.entry('K1'), trans));
    expect(unpark).toHaveBeenCalledWith('K1');
    expect(save).not.toHaveBeenCalled();
  });

  it('offers to cancel the wait for the GPU, in words of its own', async () => {
    await model.refresh('K1');
    const kind = 'unpark';
    model.follow(aMove({ kind, phase: 'waiting', status: 'running' }));
    const clicked = actions.click('K1', faceOf(model.entry('K1'), trans));
    await settle();
    const dialog = document.querySelector('.jp-Dialog')!;
    expect(dialog.textContent).toContain('Cancel Unparking');
    expect(dialog.textContent).toContain('The kernel stays parked.');

    // The question is moot when the kernel has its GPU.
    server.operation.mockResolvedValue(aMove({ kind }));
    server.sayOperation({ kind, status: 'done' });
    await clicked;
    expect(document.querySelector('.jp-Dialog')).toBeNull();
  });

  it('reads what is waited for anew as the wait goes on', async () => {
    await model.refresh('K1');
    const wait = { kind: 'unpark' as const, phase: 'waiting' };
    for (const position of [2, 1]) {
      server.kernel.mockResolvedValue(
        aKernel({ parked: aParked({ position }) })
      );
      server.sayOperation(wait);
      await settle();
      expect(model.entry('K1').kernel?.parked?.position).toBe(position);
      expect(model.entry('K1').operation?.kind).toBe('unpark');
    }
  });

  it('says once, and quietly, why an idle kernel could not be parked', async () => {
    const running = new Running();
    new UnaskedParks({
      kernels: running.manager,
      model,
      notices: new Notices({} as never, trans),
      trans
    });
    await model.refresh('K1');
    let tries = 0;
    const parked = async (
      change: Partial<IOperation>,
      reason = 'dump_failed'
    ) => {
      tries += 1;
      const error = anError({ message: 'It does not fit.', reason });
      const ended = { kind: 'park', cause: 'idle', id: `P${tries}`, ...change };
      const begun = { ...ended, status: 'running' } as Partial<IOperation>;
      server.operation.mockResolvedValue(
        aMove({ status: 'failed', error, ...ended } as Partial<IOperation>)
      );
      server.sayOperation(begun);
      server.sayOperation({ ...begun, status: change.status ?? 'failed' });
      await settle();
      return said();
    };
    // Nobody knows how it went where the server was away: the next one is told.
    const away = [
      'http_error',
      'no_extension',
      'unknown_operation',
      'unreachable'
    ];
    for (const reason of ['busy', ...away]) {
      expect(await parked({}, reason)).toEqual([]);
    }
    expect(await parked({ cause: 'user' })).toEqual([]);
    const told = ['info | a.ipynb keeps its GPU: It does not fit.'];
    expect(await parked({})).toEqual(told);
    Notification.dismiss();
    expect(await parked({})).toEqual([]);
    // It ended, and came back out of a state.
    running.are('K2');
    expect(await parked({})).toEqual(told);
    Notification.dismiss();
    // It was parked meanwhile: what fails next is news.
    expect(await parked({ status: 'done' })).toEqual([]);
    expect(await parked({})).toEqual(told);
  });
});
