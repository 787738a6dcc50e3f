import { Notification } from '@jupyterlab/apputils';
import { nullTranslator } from '@jupyterlab/translation';

import type { IOperation, IVerification, KernelStateAPI } from '../api';
import { faceOf } from '../face';
import { OperationFollower } from '../follower';
import { Notices, subject } from '../notices';
import type { IGapActions } from '../restorenotices';
import {
  Server,
  aKernel,
  aRestoredFrom,
  aResult,
  aVerification,
  anOperation
} from './fixtures';

const trans = nullTranslator.load('');
const API = {} as KernelStateAPI;
const DIED = 'The kernel died and was restored to its state saved just now.';
const RESTORED = 'Kernel state restored (118 MB in 1.2 s)';

/** What is on screen, newest first: type, message and buttons. */
function shown(): string[] {
  jest.advanceTimersByTime(1000);
  return Notification.manager.notifications.map(({ type, message, options }) =>
    [type, message, ...(options.actions ?? []).map(({ label }) => label)].join(
      ' | '
    )
  );
}

/** What JupyterLab does after a while: the notifications are on screen. */
function draw(): void {
  document.body.replaceChildren();
  for (const { id, message } of Notification.manager.notifications) {
    const node = document.createElement('div');
    node.id = id;
    node.innerHTML = '<div class="jp-toast-message"></div>';
    node.firstElementChild!.textContent = message;
    document.body.append(node);
  }
}

describe('Notices of a check', () => {
  beforeEach(() => jest.useFakeTimers());
  afterEach(() => {
    Notification.dismiss();
    jest.useRealTimers();
  });

  async function verified(change: Partial<IVerification>): Promise<void> {
    const notices = new Notices(API, trans);
    const verification = aVerification(change);
    const final = anOperation({
      kind: 'verify',
      status: 'done',
      result: aResult({ verification })
    });
    await notices.follow(new OperationFollower(final, API));
  }

  it('say that a state is whole', async () => {
    await verified({});
    expect(shown()).toEqual([
      'success | The state is whole: all of it was read back.'
    ]);
  });

  it('say how much of a state is lost, and whether another is whole', async () => {
    const lost = 1_000_000;
    const items = [{ kind: 'python' as const, name: '[heap]', size: lost }];
    await verified({ intact: false, lost, items, older: 'S0' });
    expect(shown()).toEqual([
      'error | 1 MB of the state cannot be read back. An older state was read back too, and is whole. | Details'
    ]);
  });
});

describe('The notice of a save', () => {
  beforeEach(() => jest.useFakeTimers());
  afterEach(() => {
    Notification.dismiss();
    document.body.replaceChildren();
    jest.useRealTimers();
  });

  it('says that it waits for the GPU, and for how long', () => {
    const server = new Server();
    const model = server.model();
    const notices = new Notices(model.api, trans);
    const follower = model.follow(anOperation());
    void notices.follow(follower);
    draw();
    const texts = () => shown().map(text => text.split(' | ')[1]);
    const kernel = aKernel();
    const face = () =>
      faceOf({ kernel, error: null, operation: follower.operation }, trans);
    for (const seconds of [1, 2, 3]) {
      server.sayOperation({ phase: 'gpu' });
      const waits = `Waiting for the GPU to finish its work (${seconds} s)`;
      expect(face().title).toBe(`${waits} (click to cancel)`);
      expect(face().announcement).not.toContain(' s)');
      // This lets a second pass.
      expect(texts()).toEqual([waits]);
    }
    server.sayOperation({ phase: 'dumping', progress: 0.5 });
    expect(texts()).toEqual(['Saving kernel state… 50%']);
    expect(face().label).toBe('50%');
    model.dispose();
  });
});

describe('Of what is told of one kernel', () => {
  const failure = {
    message: 'No room.',
    reason: 'no_space',
    hint: null,
    details: null
  };
  let notices: Notices;

  beforeEach(() => {
    jest.useFakeTimers();
    notices = new Notices(API, trans);
  });

  afterEach(() => {
    Notification.dismiss();
    jest.useRealTimers();
  });

  const end = (change: Partial<IOperation>) =>
    notices.follow(new OperationFollower(anOperation(change), API));

  it('only the last restore stays, however it came to it', async () => {
    const died = (kernelId: string) =>
      notices.restores.restored(kernelId, null, null, () => undefined);
    const restoredAgain = 'The kernel died and was restored';
    const woke = aRestoredFrom({ cause: 'wake', warnings: ['A is closed.'] });
    const texts = () => shown().map(text => text.split(' | ')[1]);
    died('K1');
    died('K1');
    expect(texts()).toEqual([expect.stringContaining(restoredAgain)]);
    notices.restores.cameBack('K1', woke);
    expect(texts()).toEqual(['The kernel woke up. A is closed.']);
    died('K1');
    died('K2');
    expect(texts()).toHaveLength(2);
    await end({ kind: 'restore', status: 'done', result: aResult() });
    expect(texts()).toEqual([
      expect.stringContaining('Kernel state restored'),
      expect.stringContaining(restoredAgain)
    ]);
  });

  it('only the last restore stays, where the user has closed what was said', () => {
    const actions = { stateId: 'S1', runAgain: jest.fn(), dismiss: jest.fn() };
    notices.restores.restored('K1', null, null, () => undefined);
    jest.advanceTimersByTime(5000); // not on screen any more
    notices.restores.gap('K1', '2 cells.', actions, true);
    expect(shown()).toEqual(['warning | 2 cells. | Run These Again | Dismiss']);
  });

  it.each(['save', 'restore', 'park'] as const)(
    'only the last failed %s stays, until one succeeds',
    async kind => {
      const failed = { kind, status: 'failed', error: failure } as const;
      await end(failed);
      await end(failed);
      expect(shown()).toEqual(['warning | No room.']);
      await end({ ...failed, kernel_id: 'K2' });
      expect(shown()).toHaveLength(2);
      await end({ kind, status: 'done', result: aResult() });
      expect(shown()).toEqual([
        expect.stringMatching(/^success/),
        'warning | No room.'
      ]);
    }
  );

  it.each([
    ['warning', 'busy'],
    ['warning', 'no_space'],
    ['warning', 'not_savable'],
    ['warning', 'bad_request'],
    ['warning', 'not_restorable'],
    ['error', 'dump_failed'],
    ['error', 'restore_failed'],
    ['error', 'internal'],
    ['error', 'unreachable']
  ])(
    'a refusal is a warning, a fault an error: %s, %s',
    async (type, reason) => {
      const error = { ...failure, message: 'So it is.', reason };
      for (const kind of ['save', 'restore', 'park', 'unpark'] as const) {
        await end({ kind, status: 'failed', error });
        expect(shown().pop()).toMatch(new RegExp(`^${type} \\| `));
        notices.error('Not Begun', error, { about: subject(kind, 'K1') });
        expect(shown().pop()).toMatch(new RegExp(`^${type} \\| `));
      }
    }
  );

  it('a failure to begin gives way, too', async () => {
    const about = subject('unpark', 'K1');
    notices.error('Unparking Kernel Failed', failure, { about });
    notices.error('Unparking Kernel Failed', failure, { about });
    expect(shown()).toEqual(['warning | No room.']);
    await end({ kind: 'park', status: 'cancelled' });
    expect(shown()).toEqual([expect.stringMatching(/^info/)]);
  });

  it('what does not wake changes the notice that is there', () => {
    notices.error('Restoring Failed', failure, {
      about: subject('restore', 'K1')
    });
    const [{ id }] = Notification.manager.notifications;
    const again = { ...failure, message: 'Still no room.' };
    notices.notWoken('K1', again);
    notices.notWoken('K1', again);
    expect(shown()).toEqual(['warning | Still no room.']);
    expect(Notification.manager.notifications[0].id).toBe(id);
    notices.forget(subject('restore', 'K1'));
    expect(shown()).toEqual([]);
    notices.notWoken('K1', again);
    expect(shown()).toEqual(['warning | Still no room.']);
  });

  it('each damaged state stays named', async () => {
    const verification = aVerification({ intact: false });
    for (const state_id of ['S1', 'S2', 'S2']) {
      const result = aResult({ verification });
      await end({ kind: 'verify', status: 'done', state_id, result });
    }
    expect(shown()).toHaveLength(2);
  });
});

describe('Notices of a gap', () => {
  let notices: Notices;
  const actions: IGapActions = {
    stateId: 'S1',
    runAgain: jest.fn(),
    dismiss: jest.fn()
  };

  async function restore(state_id: string): Promise<void> {
    const final = anOperation({
      kind: 'restore',
      status: 'done',
      result: aResult({ state_id })
    });
    await notices.follow(new OperationFollower(final, API));
  }

  beforeEach(() => {
    jest.useFakeTimers();
    notices = new Notices(API, trans);
  });

  afterEach(() => {
    Notification.dismiss();
    document.body.replaceChildren();
    jest.useRealTimers();
  });

  const died = () =>
    notices.restores.restored('K1', 'just now', null, () => undefined);

  it.each(['the death', 'the gap'])(
    'are one with the death, also where %s is told first',
    first => {
      const tell = [
        died,
        () => notices.restores.gap('K1', '2 cells.', actions, true)
      ];
      (first === 'the death' ? tell : tell.reverse()).forEach(told => told());
      expect(shown()).toEqual([
        `warning | ${DIED} 2 cells. | Run These Again | Start Fresh Instead | Dismiss`
      ]);
    }
  );

  const CAME_BACK = aRestoredFrom({
    created: new Date().toISOString(),
    restored: '2026-12-02T16:00:01Z',
    cause: 'wake',
    warnings: ['Did not come back: connection to 10.0.0.5:5432 (postgresql).']
  });

  it('are one with what did not come back', () => {
    notices.restores.cameBack('K1', CAME_BACK);
    expect(shown()).toEqual([
      `warning | The kernel woke up. ${CAME_BACK.warnings[0]}`
    ]);
    notices.restores.gap('K1', '2 cells.', actions, true);
    expect(shown()).toHaveLength(1);
    const warnings = [
      ...CAME_BACK.warnings,
      'Output may be missing. '.repeat(9)
    ];
    notices.restores.cameBack('K2', { ...CAME_BACK, cause: 'lost', warnings });
    expect(shown()[0]).toBe(
      'warning | The kernel was restored to its state saved just now. | Details'
    );
  });

  it('know which restores this page asked for', async () => {
    const times = { started: '2026-12-02T16:00:00Z', finished: null };
    const has = (restored: string) =>
      notices.restores.hasTold('K1', { ...CAME_BACK, restored });
    expect(has('2026-12-02T16:00:01Z')).toBe(false);
    const operation = anOperation({ kind: 'restore', ...times });
    const finished = '2026-12-02T16:00:02Z';
    const final = { ...operation, status: 'cancelled', finished };
    const api = { operation: async () => final } as unknown as KernelStateAPI;
    const followed = notices.follow(new OperationFollower(operation, api));
    // It is restored before the operation has ended.
    expect(has('2026-12-02T16:00:01Z')).toBe(true);
    expect(has('2026-12-02T15:00:01Z')).toBe(false);
    jest.advanceTimersByTime(1000);
    await followed;
    expect(has('2026-12-02T16:00:01Z')).toBe(true);
    expect(has('2026-12-02T16:00:03Z')).toBe(false);
  });

  it('go with the last mark, however soon after the one before', () => {
    notices.restores.gap('K1', '2 cells.', actions, true);
    draw();
    notices.restores.gap('K1', '1 cell.', actions, false);
    notices.restores.gapClosed('K1', false);
    // JupyterLab draws changes later, each by a timer: only then it may go.
    jest.advanceTimersByTime(10);
    expect(Notification.manager.count).toBe(1);
    expect(shown()).toEqual([]);
  });

  it('are changed until they are drawn so', () => {
    died();
    draw();
    const changes: string[] = [];
    Notification.manager.changed.connect((_, { notification }) => {
      changes.push(notification.message);
    });
    notices.restores.gap('K1', '2 cells.', actions, true);
    jest.advanceTimersByTime(350); // JupyterLab has lost it
    expect(changes).toEqual(Array(4).fill(`${DIED} 2 cells.`));

    draw();
    jest.advanceTimersByTime(20_000);
    expect(changes).toHaveLength(4);
  });

  it('leave what was said of the death where the kernel has all cells', () => {
    died();
    notices.restores.gap('K1', '2 cells.', actions, true);
    notices.restores.gapClosed('K1', true);
    expect(shown()).toEqual([`warning | ${DIED} | Start Fresh Instead`]);
    notices.restores.gapClosed('K1', false); // no gap is left to close
    expect(shown()).toHaveLength(1);
  });

  it('give way to a restore from another state', async () => {
    notices.restores.gap('K1', '2 cells.', actions, true);
    await restore('S3');
    expect(shown()).toEqual([`success | ${RESTORED}`]);
    // Its marks are cleared after that.
    notices.restores.gapClosed('K1', true);
    expect(shown()).toEqual([`success | ${RESTORED}`]);
  });

  it('are one with the restore that they are of', async () => {
    notices.restores.gap('K1', '2 cells.', actions, true);
    await restore('S1');
    expect(shown()).toEqual([
      `warning | ${RESTORED} 2 cells. | Run These Again | Dismiss`
    ]);
  });

  it('stay closed where the user closed them', () => {
    notices.restores.gap('K1', '3 cells.', actions, true);
    for (const left of [2, 1]) {
      // Not on screen: nothing draws it here.
      jest.advanceTimersByTime(2000);
      notices.restores.gap('K1', `${left} cells.`, actions, false);
    }
    expect(shown()[0]).toContain('2 cells.');
  });
});
