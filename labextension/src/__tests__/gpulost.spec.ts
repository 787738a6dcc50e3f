import { Notification } from '@jupyterlab/apputils';
import { nullTranslator } from '@jupyterlab/translation';

import { Actions } from '../actions';
import { faceOf } from '../face';
import { LostGpus } from '../gpulost';
import type { KernelStates } from '../model';
import type { KernelPages } from '../pages';
import { KERNEL, Server, aKernel, aRestore, settle } from './fixtures';

const trans = nullTranslator.load('');
const WORDS =
  "The kernel's GPU (NVIDIA L4) fell off the bus (Xid 79). Restore its last saved state.";

describe('A kernel whose GPU is lost', () => {
  let server: Server;
  let model: KernelStates;
  const restore = jest.fn();
  const pages = { ofKernel: () => [] } as unknown as KernelPages;

  beforeEach(() => {
    jest.useFakeTimers();
    restore.mockClear();
    server = new Server();
    model = server.model();
  });

  afterEach(() => {
    Notification.dismiss();
    model.dispose();
    jest.useRealTimers();
  });

  function tell(everywhere: boolean): void {
    new LostGpus({ everywhere, model, pages, restore, trans });
  }

  function lost(): void {
    const event = aRestore({ state_id: 'S1', message: WORDS });
    server.say(KERNEL, { ...event, action: 'gpu_lost' });
  }

  function said(): string[] {
    jest.advanceTimersByTime(1000);
    return Notification.manager.notifications.map(
      ({ type, message }) => `${type} | ${message}`
    );
  }

  it('is told of once, with what to do, until it is restored', async () => {
    tell(true);
    lost();
    lost();
    const told = [`warning | a.ipynb: ${WORDS}`];
    expect(said()).toEqual(told);
    expect(told[0].length).toBeLessThan(140);
    const [{ options }] = Notification.manager.notifications;
    expect(options.autoClose).toBe(false);
    options.actions![0].callback({} as MouseEvent);
    expect(restore).toHaveBeenCalledWith({ kernelId: 'K1', path: 'a.ipynb' });
    const restored = aRestore();
    server.say(KERNEL, restored);
    expect(said()).toEqual([]);
    lost();
    expect(said()).toEqual(told);
  });

  it('is told of by the pages that show it, also later ones', async () => {
    tell(false);
    lost();
    expect(said()).toEqual([]);
    server.kernel.mockResolvedValue(aKernel({ gpu_lost: WORDS }));
    await model.refresh('K1');
    expect(said()).toEqual([`warning | a.ipynb: ${WORDS}`]);
    // Another process: restarted, say.
    server.kernel.mockResolvedValue(aKernel());
    await model.refresh('K1');
    expect(said()).toEqual([]);
  });

  it('is marked on the button, which offers its states', async () => {
    const kernel = aKernel({ gpu_lost: WORDS });
    server.kernel.mockResolvedValue(kernel);
    await model.refresh('K1');
    const face = faceOf(model.entry('K1'), trans);
    expect([face.state, face.label]).toEqual(['gpu-lost', 'GPU lost']);
    expect(face.title).toContain(WORDS);
    const actions = new Actions({
      model,
      trans
    } as unknown as Actions.IOptions);
    const offered = jest.spyOn(actions, 'restore').mockResolvedValue();
    await actions.click('K1', face);
    await settle();
    expect(offered).toHaveBeenCalledWith({ kernelId: 'K1', path: 'a.ipynb' });
  });
});
