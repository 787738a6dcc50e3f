/** How many are remembered, the oldest forgotten first. */
const MOST = 50;

/** What this browser remembers beyond a page, as which notices were dismissed. */
export class Remembered {
  /** @param _key - where it is kept in the browser's storage */
  constructor(private readonly _key: string) {}

  has(name: string): boolean {
    return this._all().includes(name);
  }

  add(name: string): void {
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
