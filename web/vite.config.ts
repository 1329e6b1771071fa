import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vitest/config";

// The built page is a part of the service's package; the API serves it at `/` (`api/routes/page.py`).
export default defineConfig({
  plugins: [svelte()],
  build: {
    outDir: "../services/watchstep_services/page",
    emptyOutDir: true,
    assetsInlineLimit: 0, // the Content-Security-Policy allows no data: URL but in pictures
    modulePreload: { polyfill: false },
    target: "es2022",
  },
  server: {
    // `npm run dev` works beside `watchstep serve`.
    proxy: { "/v1": "http://127.0.0.1:8642", "/docs": "http://127.0.0.1:8642" },
  },
  test: { environment: "jsdom", include: ["src/**/*.test.ts"] },
});
