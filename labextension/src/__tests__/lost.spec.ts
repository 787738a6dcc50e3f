import { Dialog } from '@jupyterlab/apputils';
import { nullTranslator } from '@jupyterlab/translation';

import type { ILostKernel, ISavedGpus } from '../api';
import { showLostDialog } from '../dialogs/lost';
import { LostKernels } from '../lost';
import type { Notices } from '../notices';
import { RequestError } from '../request';
import {
  KERNEL,
  Server,
  aConnection,
  aState,
  anError,
  anOperation,
  settle,
  until
} from './fixtures';

const trans = nullTranslator.load('jupyter_gpu_ckpt');

function aLost(kernel_id: string, change: Partial<ILostKernel>): ILostKernel {
  return {
    kernel_id,
    kernel_name: 'python3',
    display_name: 'Python 3',
    path: `${kernel_id}.ipynb`,
    node: 'node-1',
    last_seen: new Date().toISOString(),
    why: 'lost',
    state: aState({ kernel_id }),
    damaged: [],
    server: '',
    ...change
  };
}

describe('the prompt for lost kernels', () => {
  it('says what of each will not come back', async () => {
    const outside = {
      connections: [aConnection()],
      devices: ['/dev/kmsg'],
      files: [],
      left_out: 0
    };
    const choice = showLostDialog(
      [
        aLost('K1', { server: 'train' }),
        aLost('K2', { state: aState({ outside }), damaged: ['S9'] })
      ],
      async id => aState({ id }),
      trans
    );
    await until(() => document.querySelector('[data-kernel-id]') !== null);
    const [first, second] = document.querySelectorAll('[data-kernel-id]');
    expect(first.textContent).toContain('server train on node-1');
    expect(second.textContent).not.toContain('server ');
    expect(first.textContent).not.toContain('Will not come back');
    expect(first.querySelector('details')).toBeNull();
    expect(second.querySelector('.jp-gpu-ckpt-closed')!.textContent).toBe(
      'Will not come back: connection to 10.0.0.5:5432 (postgresql)'
    );
    // Beside the label: a click there must not change what is selected.
    const more = second.querySelector('details')!;
    expect(more.closest('label')).toBeNull();
    expect(more.textContent).toContain('Not in the state (2)');
    expect(more.textContent).toContain('device /dev/kmsg');

    document.querySelector<HTMLElement>('.jp-gpu-ckpt-restore-lost')!.click();
    const { action, kernels } = (await choice)!;
    expect(action).toBe('restore');
    expect(kernels.map(kernel => kernel.kernel_id)).toEqual(['K1', 'K2']);
    Dialog.flush();
  });

  it('says so where none is selected, of which nothing can be asked', async () => {
    const choice = showLostDialog(
      [aLost('K1', {}), aLost('K2', {})],
      async id => aState({ id }),
      trans
    );
    const button = (name: string) =>
      document.querySelector<HTMLButtonElement>(`.jp-gpu-ckpt-${name}-lost`)!;
    const boxes = () => [
      ...document.querySelectorAll<HTMLInputElement>(
        '.jp-Dialog [type=checkbox]'
      )
    ];
    await until(() => boxes().length === 2);
    const said = () => document.querySelector('.jp-Dialog [role="alert"]');
    expect(said()).toBeNull();
    expect(button('dismiss').disabled).toBe(false);
    boxes().forEach(box => box.click());
    await until(() => said()?.textContent === 'No kernel is selected.');
    await until(() => button('dismiss').disabled && button('restore').disabled);

    boxes()[1].click();
    await until(
      () => !button('dismiss').disabled && !button('restore').disabled
    );
    button('dismiss').click();
    const { action, kernels } = (await choice)!;
    expect(action).toBe('dismiss');
    expect(kernels.map(kernel => kernel.kernel_id)).toEqual(['K2']);
    Dialog.flush();
  });

  it('lets the user choose GPUs, where there is a choice', async () => {
    const gpus = (names: string[]): ISavedGpus => ({
      memory: 1,
      gpus: [
        {
          uuid: 'GPU-a',
          name: 'H100',
          memory: 80_000_000_000,
          used: true,
          choices: names.map((uuid, index) => ({
            index,
            uuid,
            name: 'H100',
            free: 79_000_000_000
          }))
        }
      ]
    });
    const found: Record<string, string[]> = {
      S1: ['GPU-0', 'GPU-1'],
      S2: ['GPU-0']
    };
    const read = jest.fn(async (id: string) => {
      if (id === 'S3') {
        throw new Error('away');
      }
      return aState({ id, gpu: gpus(found[id]) });
    });
    const gpu = gpus([]);
    const choice = showLostDialog(
      [
        aLost('K0', {}),
        ...[1, 2, 3].map(n =>
          aLost(`K${n}`, { state: aState({ id: `S${n}`, gpu }) })
        )
      ],
      read,
      trans
    );
    await until(() => document.querySelector('.jp-Dialog select') !== null);
    expect(read.mock.calls.flat()).toEqual(['S1', 'S2', 'S3']);
    const selects =
      document.querySelectorAll<HTMLSelectElement>('.jp-Dialog select');
    expect(selects).toHaveLength(1);
    const [select] = selects;
    expect(select.closest('[data-kernel-id]')).toHaveProperty(
      'dataset.kernelId',
      'K1'
    );
    // Its label is its own, not the check box's.
    expect(select.labels[0].textContent).toContain('Restore onto GPU');
    select.value = 'GPU-1';
    select.dispatchEvent(new Event('change', { bubbles: true }));
    document.querySelector<HTMLElement>('.jp-gpu-ckpt-restore-lost')!.click();
    const { gpuMaps } = (await choice)!;
    expect([...gpuMaps]).toEqual([['K1', { 'GPU-a': 'GPU-1' }]]);
    Dialog.flush();
  });
});

describe('LostKernels', () => {
  let lost: ILostKernel[];
  let kernels: LostKernels;
  let server: Server;
  let isWanted: boolean;
  const dismissLost = jest.fn();
  const restoreLost = jest.fn();
  const notices = {
    error: jest.fn(),
    follow: jest.fn(async () => anOperation({ status: 'failed' }))
  };

  const asked = () =>
    [...document.querySelectorAll<HTMLElement>('[data-kernel-id]')].map(
      ({ dataset }) => dataset.kernelId
    );
  const answer = (name: string) =>
    document.querySelector<HTMLElement>(`.jp-gpu-ckpt-${name}-lost`)!.click();
  const gone = () => until(() => document.querySelector('.jp-Dialog') === null);

  beforeEach(() => {
    jest.clearAllMocks();
    lost = [aLost('K1', {}), aLost('K2', {})];
    isWanted = true;
    server = new Server();
    Object.assign(server, { dismissLost, lost: async () => lost, restoreLost });
    kernels = new LostKernels({
      api: server,
      enabled: () => isWanted,
      everywhere: true,
      model: server.model(),
      notices: notices as unknown as Notices,
      trans
    } as unknown as LostKernels.IOptions);
  });

  it('asks once of each kernel, whatever the answer', async () => {
    void kernels.check();
    await until(() => asked().length === 2);
    answer('dismiss');
    await gone();
    await until(() => dismissLost.mock.calls.length === 2);
    expect(dismissLost.mock.calls).toEqual([['K1'], ['K2']]);
    expect(restoreLost).not.toHaveBeenCalled();

    // The server did not hear of it, say: the page remembers.
    await kernels.check();
    expect(asked()).toEqual([]);
    lost.push(aLost('K3', {}));
    server.say(KERNEL, { action: 'lost', kernel_id: 'K3' });
    await until(() => asked().length === 1);
    expect(asked()).toEqual(['K3']);
    // While the question is open, too.
    server.say(KERNEL, { action: 'lost', kernel_id: 'K3' });
    await settle();
    expect(document.querySelectorAll('.jp-Dialog')).toHaveLength(1);
    Dialog.tracker.forEach(dialog => dialog.reject());
    await gone();
    expect(dismissLost).toHaveBeenCalledTimes(2);
  });

  it('asks again where restoring did not work', async () => {
    restoreLost.mockRejectedValueOnce(new RequestError(409, anError()));
    restoreLost.mockResolvedValueOnce(anOperation({ kind: 'restore' }));
    void kernels.check();
    await until(() => asked().length === 2);
    answer('restore');
    await until(
      () =>
        notices.error.mock.calls.length + notices.follow.mock.calls.length === 2
    );
    await gone();
    expect(restoreLost.mock.calls.map(([id]) => id)).toEqual(['K1', 'K2']);
    void kernels.check();
    await until(() => asked().length === 2);
    Dialog.tracker.forEach(dialog => dialog.reject());
    await gone();
  });

  it('is silent where its user does not want to be asked', async () => {
    isWanted = false;
    await kernels.check();
    expect(asked()).toEqual([]);
    // But not when told to show them.
    void kernels.show();
    await until(() => asked().length === 2);
    Dialog.tracker.forEach(dialog => dialog.reject());
    await gone();
  });
});
