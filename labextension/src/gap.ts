import type { IRestoredFrom } from './api';

/** What is known of a code cell. */
export interface IRanCell {
  id: string;
  /** Its execution counter, `null` where it has none. */
  count: number | null;
  source: string;
  /** When it ran, in ISO 8601, where the notebook recorded that. */
  ran: string | null;
}

/** What the kernel was given to execute, by execution counter. */
export type History = ReadonlyMap<number, string>;

/**
 * The cells that ran after a state was saved, and of which the kernel that was
 * restored from it knows nothing; in the order in which they ran.
 *
 * The cell that ran during the save has the state's own counter, goes on, and
 * is not among them.
 *
 * @param cells - the notebook's code cells
 * @param from - what the kernel was restored from
 * @param history - what the kernel has executed, `null` where it does not say
 */
export function undoneCells<T extends IRanCell>(
  cells: readonly T[],
  from: IRestoredFrom,
  history: History | null
): T[] {
  const saved = from.execution_count ?? 0;
  const last = from.last_execution_count ?? Infinity;
  return cells
    .filter(({ id, count, source, ran }) => {
      if (count === null || count <= saved || count > last) {
        return false;
      }
      if (from.other_counts[id] === count) {
        // So it was before the save: it ran in an earlier kernel.
        return false;
      }
      if (
        ran &&
        (isBefore(ran, from.created) || isBefore(from.restored, ran))
      ) {
        return false;
      }
      // It was run again since, if that is what the kernel has there now.
      return history?.get(count)?.trimEnd() !== source.trimEnd();
    })
    .sort((a, b) => a.count! - b.count!);
}

function isBefore(a: string, b: string): boolean {
  return new Date(a).getTime() < new Date(b).getTime();
}
