import { Dialog } from '@jupyterlab/apputils';
import { nullTranslator } from '@jupyterlab/translation';

import type { ILostKernel } from '../api';
import { showLostDialog } from '../dialogs/lost';
import { aConnection, aState, until } from './fixtures';

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
});
