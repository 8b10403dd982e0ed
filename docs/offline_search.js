/* Search without a server: browsers start no worker from file://, so that its script runs in a frame.
   Only what the theme's search uses of a worker: messages, both ways. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inner.document.createElement("script");
      script.onload = () => {
        this.isReady = true;
        this.waiting.forEach(data => this.postMessage(data));
      };
      script.src = url;
      this.inner.document.body.append(script);
    }
    postMessage(data) {
      if (!this.isReady) this.waiting.push(data);
      else this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }));
    }
  };
}
