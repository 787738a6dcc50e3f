import { Dialog } from '@jupyterlab/apputils';
import { nullTranslator } from '@jupyterlab/translation';

import type { IState, IVerification } from '../api';
import type { IRestoreChoice } from '../dialogs/restore';
import { RestoreDialog } from '../dialogs/restore';
import type { OperationFollower } from '../follower';
import type { KernelStates } from '../model';
import {
  KERNEL,
  Server,
  aResult,
  aState,
  aVerification,
  anOperation,
  until
} from './fixtures';

const trans = nullTranslator.load('jupyter_gpu_ckpt');

// Pages are not laid out here.
Element.prototype.scrollIntoView = () => undefined;

function find<T extends HTMLElement>(selector: string): T {
  return document.querySelector<T>(`.jp-Dialog ${selector}`)!;
}

/** The texts of the states that are listed. */
function listed(): string[] {
  const items = document.querySelectorAll('.jp-Dialog [data-state-id]');
  return [...items].map(
    item => `${item.getAttribute('data-state-id')} ${item.textContent}`
  );
}

function selected(): string | undefined {
  return find('[aria-selected="true"]')?.dataset.stateId;
}

/** Whether a button of the dialog can be pressed. */
function offers(name: string): boolean {
  const button = find<HTMLButtonElement>(`.jp-gpu-ckpt-${name}`);
  return !button.disabled && !button.hidden;
}

describe('RestoreDialog', () => {
  let server: Server;
  let model: KernelStates;
  let states: IState[];
  let left: OperationFollower[];
  let choice: Promise<IRestoreChoice | null>;

  async function show(): Promise<void> {
    choice = RestoreDialog.show({
      model,
      trans,
      states: async () => states.map(state => ({ ...state })),
      leave: follower => left.push(follower)
    });
    await until(() => document.querySelector('.jp-Dialog p') !== null);
  }

  async function close(): Promise<void> {
    Dialog.tracker.forEach(dialog => dialog.reject());
    expect(await choice).toBeNull();
  }

  function say(action: string, state_id: string): void {
    server.say(KERNEL, { action, kernel_id: 'K1', state_id });
  }

  beforeEach(() => {
    server = new Server();
    model = server.model();
    left = [];
    states = [
      aState({ id: 'S2', durable: false }),
      aState({ id: 'S1', durable: false })
    ];
  });

  afterEach(async () => {
    await close();
    model.dispose();
  });

  it('says of a state that arrives in the remote store that it is no longer local only', async () => {
    await show();
    const local = () => listed().map(text => text.includes('local only'));
    expect(local()).toEqual([true, true]);
    states[0].durable = true;
    say('state_durable', 'S2');
    await until(() => !local()[0]);
    expect(local()).toEqual([false, true]);
  });

  it('lists what is saved and deleted meanwhile, and keeps the selection', async () => {
    await show();
    find('[data-state-id="S1"]').click();
    await until(() => selected() === 'S1');
    states = [aState({ id: 'S3' }), ...states];
    server.sayOperation({ status: 'done' });
    await until(() => listed().length === 3);
    expect(selected()).toBe('S1');

    states.splice(1, 1);
    say('state_deleted', 'S2');
    await until(() => listed().length === 2);
    expect(selected()).toBe('S1');

    states.pop();
    say('state_deleted', 'S1');
    await until(() => selected() === 'S3');
    expect(offers('rollback')).toBe(true);
  });

  it('begins and ends with no state at all', async () => {
    states = [];
    await show();
    expect(find('.jp-gpu-ckpt-empty').textContent).toContain('No saved state');
    for (const name of ['delete', 'open-new', 'rollback']) {
      await until(() => !offers(name));
    }
    states = [aState({ id: 'S1' })];
    server.sayOperation({ status: 'done' });
    await until(() => listed().length === 1 && offers('rollback'));
    expect(offers('delete')).toBe(true);

    states = [];
    say('state_deleted', 'S1');
    await until(() => !offers('delete'));
    expect(find('.jp-gpu-ckpt-empty')).not.toBeNull();
  });

  it('keeps what it shows while the server is away', async () => {
    await show();
    const read = jest.spyOn(states, 'map').mockImplementation(() => {
      throw new Error('away');
    });
    say('state_deleted', 'S1');
    await until(() => read.mock.calls.length > 0);
    expect(listed()).toHaveLength(2);
  });

  /** End the check of S2 with what it found. */
  function found(verification: Partial<IVerification>): void {
    server.operation.mockResolvedValue(
      anOperation({
        kind: 'verify',
        status: 'done',
        result: aResult({
          state_id: 'S2',
          verification: aVerification(verification)
        })
      })
    );
    server.sayOperation({ kind: 'verify', status: 'done' });
  }

  const said = () => find('.jp-gpu-ckpt-check').textContent;
  const verify = () => find('.jp-gpu-ckpt-verify').click();

  it('checks a state, and says that it is whole', async () => {
    await show();
    expect(said()).toContain('Not verified since it was saved.');
    verify();
    await until(() => said()!.includes('Verifying…'));
    expect(server.verify).toHaveBeenCalledWith('S2');
    server.sayOperation({ kind: 'verify', progress: 0.42 });
    await until(() => find<HTMLProgressElement>('progress').value === 0.42);
    states[0].verified = new Date().toISOString();
    found({});
    await until(() => said()!.includes('whole: all of it was read'));
    expect(offers('rollback')).toBe(true);
    // Also where it is looked at later.
    find('[data-state-id="S1"]').click();
    await until(() => said()!.includes('Not verified'));
  });

  it('says what is lost of a damaged state, and offers an older one', async () => {
    await show();
    verify();
    await until(() => server.verify.mock.calls.length > 0);
    const damage = '1.5 MB of it cannot be read back (Python heap).';
    states[0].damage = damage;
    server.state.mockImplementation(async id =>
      aState({
        id,
        restorable: id !== 'S2',
        differences:
          id === 'S2'
            ? [
                {
                  what: 'damage',
                  message: damage,
                  blocking: true,
                  saved: null,
                  here: null,
                  mode: null
                }
              ]
            : []
      })
    );
    found({
      intact: false,
      lost: 1_500_000,
      items: [
        { kind: 'files', name: '/tmp/a.npy', size: 500_000 },
        { kind: 'python', name: '[heap]', size: 1_000_000 }
      ],
      older: 'S1'
    });
    await until(() => listed()[0].includes('damaged') && !offers('rollback'));
    const lost = [...document.querySelectorAll('.jp-gpu-ckpt-check li')];
    expect(lost.map(item => item.textContent)).toEqual([
      'Python heap [heap]: 1 MB',
      'Files /tmp/a.npy: 500 kB'
    ]);
    expect(said()).toContain('1.5 MB of the state cannot be read back.');
    expect(said()).toContain('was read back too, and is whole.');
    find('.jp-gpu-ckpt-older').click();
    await until(() => selected() === 'S1' && offers('rollback'));
  });

  it('lets the user choose GPUs where several fit, each for one only', async () => {
    const choices = [0, 1].map(index => ({
      index,
      uuid: `GPU-${index}`,
      name: 'H100',
      free: 79_000_000_000 - index
    }));
    const gpus = ['GPU-a', 'GPU-b', 'GPU-c'].map((uuid, index) => ({
      uuid,
      name: 'H100',
      memory: 80_000_000_000,
      used: index < 2,
      choices: index < 2 ? choices : []
    }));
    server.state.mockImplementation(async id =>
      aState({
        id,
        restorable: true,
        gpu: id === 'S2' ? { memory: 1_000_000, gpus } : null
      })
    );
    await show();
    const selects = () => [
      ...document.querySelectorAll<HTMLSelectElement>('.jp-Dialog select')
    ];
    await until(() => selects().length === 2);
    const choose = (index: number, uuid: string) => {
      selects()[index].value = uuid;
      selects()[index].dispatchEvent(new Event('change', { bubbles: true }));
    };
    expect(selects().map(({ value }) => value)).toEqual(['', '']);
    expect(selects().map(({ labels }) => labels[0].textContent)).toEqual([
      expect.stringContaining('Restore GPU 1 (H100) onto'),
      expect.stringContaining('Restore GPU 2 (H100) onto')
    ]);
    expect([...selects()[0].options].map(({ text }) => text)).toEqual([
      'Automatic',
      'GPU 0: H100, 79 GB free',
      'GPU 1: H100, 79 GB free'
    ]);
    choose(0, 'GPU-1');
    await until(() => selects()[1].options[2].disabled);
    choose(1, 'GPU-0');
    await until(() => selects()[0].options[1].disabled);
    choose(0, '');
    await until(() => !selects()[1].options[2].disabled);

    // Another state has none, and what was chosen stays.
    find('[data-state-id="S1"]').click();
    await until(() => selects().length === 0);
    find('[data-state-id="S2"]').click();
    await until(() => selects().length === 2);
    find('.jp-gpu-ckpt-rollback').click();
    expect(await choice).toMatchObject({
      action: 'rollback',
      state: { id: 'S2' },
      gpuMap: { 'GPU-b': 'GPU-0' }
    });
    choice = Promise.resolve(null);
  });

  it('can stop a check, and leaves one that goes on to the page', async () => {
    await show();
    verify();
    await until(() => said()!.includes('Stop'));
    verify();
    await until(() => server.cancel.mock.calls.length > 0);
    server.operation.mockResolvedValue(
      anOperation({ kind: 'verify', status: 'cancelled' })
    );
    server.sayOperation({ kind: 'verify', status: 'cancelled' });
    await until(() => said()!.includes('Not verified'));

    server.verify.mockResolvedValue(
      anOperation({ id: 'O2', kind: 'verify', state_id: 'S2' })
    );
    verify();
    await until(() => said()!.includes('Stop'));
    expect(left).toEqual([]);
    await close();
    expect(left.map(({ operation }) => operation.id)).toEqual(['O2']);
  });
});
