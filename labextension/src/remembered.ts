/** How many are remembered, the oldest forgotten first. */
const MOST = 50;

/** Of which restores of kernels this browser remembers something beyond a page. */
export class RememberedRestores {
  /** @param _key - where it is kept in the browser's storage */
  constructor(private readonly _key: string) {}

  has(kernelId: string, restored: string): boolean {
    return this._all().includes(nameOf(kernelId, restored));
  }

  add(kernelId: string, restored: string): void {
    const name = nameOf(kernelId, restored);
    const all = [...this._all().filter(other => other !== name), name];
    try {
      window.localStorage.setItem(this._key, JSON.stringify(all.slice(-MOST)));
    } catch {
      // Storage may be full or forbidden: it is told again then.
    }
  }

  private _all(): string[] {
    try {
      const found = JSON.parse(window.localStorage.getItem(this._key) ?? '[]');
      return Array.isArray(found) ? found : [];
    } catch {
      return [];
    }
  }
}

function nameOf(kernelId: string, restored: string): string {
  return `${kernelId} ${restored}`;
}
