import type { ISessionContext } from '@jupyterlab/apputils';
import { nullTranslator } from '@jupyterlab/translation';
import { Signal } from '@lumino/signaling';

import type { IKernel } from '../api';
import { SaveButtonWidget } from '../button';
import type { IFace } from '../face';
import type { KernelStates } from '../model';
import { Server, aKernel, anError, aState, until } from './fixtures';

const trans = nullTranslator.load('');

/** What a notebook says of its kernel. */
class Context {
  hasNoKernel = true;
  kernelChanged = new Signal<this, object>(this);
  session: { kernel: { id: string } } | null = null;
  sessionChanged = new Signal<this, object>(this);
  statusChanged = new Signal<this, string>(this);

  use(id: string | null): void {
    this.session = id ? { kernel: { id } } : null;
    this.hasNoKernel = !id;
    this.kernelChanged.emit({});
  }
}

describe('The button', () => {
  let clicked: [string | null, IFace['state']][];
  let context: Context;
  let kernels: Record<string, IKernel>;
  let model: KernelStates;
  let widget: SaveButtonWidget;

  const control = () =>
    widget.node.querySelector<HTMLElement>('.jp-ToolbarButtonComponent')!;
  const named = (part: string) =>
    until(() => !!control()?.getAttribute('aria-label')?.includes(part));
  const said = () => widget.node.querySelector('[role="status"]')?.textContent;
  const shows = (state: string) =>
    until(() => widget.node.dataset.state === state);

  beforeEach(() => {
    clicked = [];
    context = new Context();
    kernels = {
      K1: aKernel({ last_state: aState() }),
      K2: aKernel({ id: 'K2' }),
      K3: aKernel({
        id: 'K3',
        savable: false,
        error: anError({ hint: 'Ask the administrator.' })
      })
    };
    const server = new Server();
    server.kernel.mockImplementation(
      async (...args: unknown[]) => kernels[args[0] as string]
    );
    model = server.model();
    widget = new SaveButtonWidget({
      sessionContext: context as unknown as ISessionContext,
      model,
      trans,
      onClick: (kernelId, { state }) => clicked.push([kernelId, state])
    });
  });

  afterEach(() => {
    widget.dispose();
    model.dispose();
    jest.restoreAllMocks();
  });

  it('shows the kernel that its notebook has now', async () => {
    SaveButtonWidget.attach(widget, document.body);
    await shows('unavailable');
    await named('has no kernel');
    context.use('K1');
    await shows('saved');
    await named('(saved just now)');
    expect(widget.node.textContent).toContain('Saved just now');
    expect(said()).toBe('Kernel state saved');
    context.use('K2');
    await shows('ready');
    await until(() => said() === '');
    expect(widget.node.textContent).not.toContain('Saved');
    context.use('K3');
    await shows('unavailable');
    // A late answer about one that it had.
    await model.refresh('K1');
    expect(widget.node.dataset.state).toBe('unavailable');
  });

  it.each([
    { gpu_lost: 'The GPU fell off the bus.' },
    {
      parked: {
        since: '2026-12-02T15:00:00Z',
        host_bytes: 1000,
        position: null,
        waiting: null
      }
    },
    { execution_state: 'hibernated' }
  ])('shows that a restart ends %p', async change => {
    kernels.K1 = aKernel(change);
    SaveButtonWidget.attach(widget, document.body);
    context.use('K1');
    await until(() => !!said());
    kernels.K1 = aKernel();
    context.statusChanged.emit('restarting');
    context.statusChanged.emit('idle');
    await shows('ready');
  });

  it('stays in reach, and says why, where the kernel cannot be saved', async () => {
    SaveButtonWidget.attach(widget, document.body);
    context.use('K3');
    await until(() => !!said()?.includes('cannot be captured here'));
    await until(() => control().getAttribute('aria-disabled') === 'true');
    expect(control().hasAttribute('disabled')).toBe(false);
    expect(control().getAttribute('aria-label')).toBe(
      'Cannot save kernel state: It cannot be captured here.\nAsk the administrator.'
    );
    const key = { key: 'Enter', bubbles: true };
    control().dispatchEvent(new KeyboardEvent('keydown', key));
    expect(clicked).toEqual([['K3', 'unavailable']]);

    context.use('K2');
    await until(() => control().getAttribute('aria-disabled') === 'false');
  });

  it('shows how old the last state is by now', async () => {
    const every = jest.spyOn(window, 'setInterval');
    SaveButtonWidget.attach(widget, document.body);
    context.use('K1');
    await shows('saved');
    const now = Date.now();
    jest.spyOn(Date, 'now').mockImplementation(() => now + 5 * 60_000);
    const again = every.mock.calls.filter(([, delay]) => delay! <= 60_000);
    expect(again).toHaveLength(1);
    (again[0][0] as () => void)();
    await until(() => widget.node.textContent!.includes('5 min. ago'));
  });
});
