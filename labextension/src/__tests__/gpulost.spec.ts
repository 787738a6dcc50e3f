import { Notification } from '@jupyterlab/apputils';
import { nullTranslator } from '@jupyterlab/translation';

import { Actions } from '../actions';
import { faceOf } from '../face';
import { LostGpus } from '../gpulost';
import type { KernelStates } from '../model';
import type { KernelPages } from '../pages';
import { RequestError } from '../request';
import {
  KERNEL,
  Running,
  Server,
  aKernel,
  aRestore,
  aState,
  anError,
  settle,
  until
} from './fixtures';

const trans = nullTranslator.load('');
const WORDS =
  "The kernel's GPU (NVIDIA L4) fell off the bus (Xid 79). Restore its last saved state.";

const TOLD = `warning | a.ipynb: ${WORDS}`;

describe('A kernel whose GPU is lost', () => {
  let server: Server;
  let model: KernelStates;
  let running: Running;
  const restore = jest.fn();
  const pages = { ofKernel: () => [] } as unknown as KernelPages;

  beforeEach(() => {
    jest.useFakeTimers();
    restore.mockClear();
    server = new Server();
    model = server.model();
    running = new Running();
  });

  afterEach(() => {
    Notification.dismiss();
    model.dispose();
    jest.useRealTimers();
  });

  function tell(everywhere: boolean): void {
    const kernels = running.manager;
    new LostGpus({ everywhere, kernels, model, pages, restore, trans });
  }

  function lost(message = WORDS, state_id: string | null = 'S1'): void {
    const event = aRestore({ state_id, message });
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
    expect(said()).toEqual([TOLD]);
    expect(TOLD.length).toBeLessThan(140);
    const [{ options }] = Notification.manager.notifications;
    expect(options.autoClose).toBe(false);
    options.actions![0].callback({} as MouseEvent);
    expect(restore).toHaveBeenCalledWith({ kernelId: 'K1', path: 'a.ipynb' });
    const restored = aRestore();
    server.say(KERNEL, restored);
    expect(said()).toEqual([]);
    lost();
    expect(said()).toEqual([TOLD]);
  });

  it('is told of by the pages that show it, also later ones', async () => {
    tell(false);
    lost();
    expect(said()).toEqual([]);
    server.kernel.mockResolvedValue(aKernel({ gpu_lost: WORDS }));
    await model.refresh('K1');
    expect(said()).toEqual([TOLD]);
    // Another process: restarted, say.
    server.kernel.mockResolvedValue(aKernel());
    await model.refresh('K1');
    expect(said()).toEqual([]);
  });

  it.each([true, false])(
    'is told of until it runs no more (by a refusal: %s)',
    async isRefused => {
      tell(true);
      server.kernel.mockResolvedValue(aKernel({ gpu_lost: WORDS }));
      await model.refresh('K1');
      const refuse = async (reason: string) => {
        const error = new RequestError(404, anError({ reason }));
        server.kernel.mockRejectedValue(error);
        await model.refresh('K1');
      };
      await refuse('unreachable');
      expect(said()).toEqual([TOLD]);
      if (isRefused) {
        await refuse('unknown_kernel');
      } else {
        running.are('K2');
      }
      expect(said()).toEqual([]);
    }
  );

  it('is told of until it is another process, also where no page shows it', async () => {
    tell(true);
    lost();
    server.kernel.mockResolvedValue(aKernel({ gpu_lost: WORDS }));
    running.are('K1');
    await settle();
    expect(said()).toEqual([TOLD]);
    server.kernel.mockResolvedValue(aKernel());
    running.are('K1');
    await settle();
    expect(said()).toEqual([]);
  });

  it('is told of anew where the process before it lost one too', async () => {
    tell(true);
    lost();
    expect(said()).toEqual([TOLD]);
    // That it was restarted was not seen.
    const words = "The kernel's GPU (NVIDIA L4) is lost. Restart it.";
    lost(words, null);
    expect(said()).toEqual([`warning | a.ipynb: ${words}`]);
    expect(Notification.manager.notifications[0].options.actions).toEqual([]);
    // The user has closed it.
    Notification.dismiss();
    lost();
    expect(said()).toEqual([TOLD]);
  });

  it('offers no states where there are none', async () => {
    tell(false);
    server.kernel.mockResolvedValue(aKernel({ gpu_lost: WORDS }));
    await model.refresh('K1');
    expect(said()).toEqual([TOLD]);
    expect(Notification.manager.notifications[0].options.actions).toEqual([]);
    const face = faceOf(model.entry('K1'), trans);
    expect(face.title).toBe(`${WORDS} (click for details)`);
    const actions = new Actions({
      model,
      trans
    } as unknown as Actions.IOptions);
    jest.useRealTimers();
    const clicked = actions.click('K1', face);
    const dialog = () => document.querySelector('.jp-Dialog');
    await until(() => !!dialog()?.textContent?.includes(WORDS));
    dialog()!.querySelector<HTMLElement>('.jp-Dialog-footer button')!.click();
    await clicked;
  });

  it('is marked on the button, which offers its states', async () => {
    const kernel = aKernel({ gpu_lost: WORDS, last_state: aState() });
    server.kernel.mockResolvedValue(kernel);
    await model.refresh('K1');
    const face = faceOf(model.entry('K1'), trans);
    expect([face.state, face.label]).toEqual(['gpu-lost', 'GPU lost']);
    expect(face.title).toBe(`${WORDS} (click to restore a saved state)`);
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
