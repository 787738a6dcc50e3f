import type { KernelStates } from '../model';
import { RequestError } from '../request';
import {
  KERNEL,
  Server,
  aKernel,
  anError,
  anOperation,
  aResult,
  aState,
  settle
} from './fixtures';

describe('KernelStates', () => {
  let server: Server;
  let model: KernelStates;

  beforeEach(() => {
    jest.useFakeTimers();
    server = new Server();
    model = server.model();
  });

  afterEach(() => {
    model.dispose();
    jest.useRealTimers();
  });

  it('reads a kernel once', async () => {
    await model.refresh('K1');
    expect(model.entry('K1').kernel?.id).toBe('K1');
    expect(server.kernel).toHaveBeenCalledTimes(1);
  });

  it('keeps the reason of a refusal', async () => {
    server.kernel.mockRejectedValue(new RequestError(503, anError()));
    await model.refresh('K1');
    expect(model.entry('K1').error).toEqual(anError());
  });

  it('is not overtaken by the answer to an earlier read', async () => {
    let late: (kernel: ReturnType<typeof aKernel>) => void = () => undefined;
    server.kernel.mockReturnValueOnce(new Promise(done => (late = done)));
    const first = model.refresh('K1');
    server.kernel.mockResolvedValueOnce(aKernel({ last_state: aState() }));
    await model.refresh('K1');
    late(aKernel());
    await first;
    expect(model.entry('K1').kernel?.last_state?.id).toBe('S1');
  });

  it('does not bring back with a late answer what it has forgotten', async () => {
    await model.refresh('K1');
    expect([...model.kernelIds]).toEqual(['K1']);
    const late = model.refresh('K1');
    model.forget('K1');
    await late;
    expect([...model.kernelIds]).toEqual([]);
    // That the node has a GPU is known all the same.
    expect(model.hasGpu).toBe(true);
  });

  it('follows a save that another page started, to its end', async () => {
    await model.refresh('K1');
    server.sayOperation({ progress: 0.1 });
    expect(model.entry('K1').operation?.progress).toBe(0.1);
    server.sayOperation({ progress: 0.9 });
    expect(model.entry('K1').operation?.progress).toBe(0.9);

    server.operation.mockResolvedValue(anOperation({ status: 'done' }));
    server.kernel.mockResolvedValue(aKernel({ last_state: aState() }));
    server.sayOperation({ status: 'done', progress: 1 });
    await settle();
    expect(model.entry('K1').operation).toBeNull();
    expect(model.entry('K1').kernel?.last_state?.id).toBe('S1');
  });

  it('keeps the operation when an older answer does not know it', async () => {
    await model.refresh('K1');
    model.follow(anOperation());
    await model.refresh('K1');
    expect(model.entry('K1').operation?.id).toBe('O1');
  });

  it('ignores kernels that no page shows, and events of others', () => {
    server.sayOperation({ kernel_id: 'K2' });
    server.say('https://example.org/other/v1', { kernel_id: 'K1' });
    expect(model.entry('K2').operation).toBeNull();
  });

  it('reads a kernel anew after something happened to it', async () => {
    await model.refresh('K1');
    const seen: string[] = [];
    model.kernelEvent.connect((_, event) => seen.push(event.action));
    server.say(KERNEL, { action: 'restored', kernel_id: 'K1' });
    expect(seen).toEqual(['restored']);
    expect(server.kernel).toHaveBeenCalledTimes(2);
  });

  it('shows nothing of a check at the kernel, but tells that it ended', async () => {
    await model.refresh('K1');
    const changed = jest.fn();
    model.statesChanged.connect(changed);
    const follower = model.follow(anOperation({ kind: 'verify' }));
    server.sayOperation({ kind: 'verify', progress: 0.5 });
    expect(follower.operation.progress).toBe(0.5);
    expect(model.entry('K1').operation).toBeNull();
    expect(changed).not.toHaveBeenCalled();
    server.operation.mockResolvedValue(
      anOperation({ kind: 'verify', status: 'done' })
    );
    server.sayOperation({ kind: 'verify', status: 'done' });
    await settle();
    expect(changed).toHaveBeenCalledTimes(1);
  });

  it('gives one follower for one operation', () => {
    expect(model.follow(anOperation())).toBe(model.follow(anOperation()));
  });
});

describe('OperationFollower', () => {
  let server: Server;
  let model: KernelStates;

  beforeEach(() => {
    jest.useFakeTimers();
    server = new Server();
    model = server.model();
  });

  afterEach(() => {
    model.dispose();
    jest.useRealTimers();
  });

  async function pass(milliseconds: number): Promise<void> {
    jest.advanceTimersByTime(milliseconds);
    await settle();
  }

  it('polls at growing intervals while no event arrives', async () => {
    model.follow(anOperation());
    await pass(999);
    expect(server.operation).toHaveBeenCalledTimes(0);
    await pass(1);
    expect(server.operation).toHaveBeenCalledTimes(1);
    await pass(1400);
    expect(server.operation).toHaveBeenCalledTimes(1);
    await pass(100);
    expect(server.operation).toHaveBeenCalledTimes(2);
    for (let second = 0; second < 120; second++) {
      await pass(1000);
    }
    const polls = server.operation.mock.calls.length;
    await pass(15_000);
    expect(server.operation.mock.calls.length).toBe(polls + 1);
  });

  it('does not poll while events arrive', async () => {
    const follower = model.follow(anOperation());
    for (let turn = 0; turn < 20; turn++) {
      await pass(500);
      follower.handleEvent({
        ...anOperation({ progress: turn / 20 }),
        type: 'operation',
        operation_id: 'O1',
        message: null,
        reason: null
      });
    }
    expect(server.operation).not.toHaveBeenCalled();
    expect(follower.operation.progress).toBeCloseTo(0.95);
  });

  it('ends with the result read over REST', async () => {
    const follower = model.follow(anOperation());
    const changed = jest.fn();
    model.statesChanged.connect(changed);
    const result = aResult({ frozen_seconds: 0.1 });
    server.operation.mockResolvedValue(anOperation({ status: 'done', result }));
    await pass(1000);
    expect((await follower.done).result).toEqual(result);
    // Also where no event tells of the end.
    expect(changed).toHaveBeenCalledTimes(1);
  });

  it('ends as failed when a new server does not know it', async () => {
    const follower = model.follow(anOperation());
    const error = anError({ reason: 'unknown_operation' });
    server.operation.mockRejectedValue(new RequestError(404, error));
    await pass(1000);
    expect(await follower.done).toMatchObject({ status: 'failed', error });
  });

  it('outlives a server that is away for a moment', async () => {
    const follower = model.follow(anOperation());
    server.operation.mockRejectedValueOnce(
      new RequestError(0, anError({ reason: 'unreachable' }))
    );
    await pass(1000);
    server.operation.mockResolvedValue(anOperation({ status: 'done' }));
    await pass(1500);
    expect((await follower.done).status).toBe('done');
  });

  it('gives up on a server that stays away', async () => {
    const follower = model.follow(anOperation());
    server.operation.mockRejectedValue(
      new RequestError(0, anError({ reason: 'unreachable' }))
    );
    for (let second = 0; second < 200; second++) {
      await pass(1000);
    }
    expect((await follower.done).error?.reason).toBe('unreachable');
  });
});
