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
  const begun = beginOf(from);
  return cells
    .filter(({ id, count, source, ran }) => {
      if (count === null || count <= saved || count > last) {
        return false;
      }
      if (from.other_counts[id] === count) {
        // So it was before the save: it ran in an earlier kernel.
        return false;
      }
      if (ran && (isBefore(ran, begun) || isBefore(from.restored, ran))) {
        return false;
      }
      const now = history?.get(count);
      if (now === undefined) {
        return true;
      }
      // The kernel has used the number again: for this cell, edited since or
      // not, unless it is another one's that has this number too.
      return (
        !isSame(now, source) &&
        cells.some(
          other =>
            other.id !== id &&
            other.count === count &&
            isSame(now, other.source)
        )
      );
    })
    .sort((a, b) => a.count! - b.count!);
}

/**
 * When the save began, before it took the kernel's memory; to the second below.
 *
 * `created` is when all was stored, until when the kernel ran on.
 */
function beginOf({ state_id, created }: IRestoredFrom): string {
  const parts = /^(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z/.exec(state_id);
  if (!parts) {
    return created;
  }
  const [, year, month, day, hours, minutes, seconds] = parts;
  return `${year}-${month}-${day}T${hours}:${minutes}:${seconds}Z`;
}

function isSame(code: string, other: string): boolean {
  return code.trimEnd() === other.trimEnd();
}

function isBefore(a: string, b: string): boolean {
  return new Date(a).getTime() < new Date(b).getTime();
}
