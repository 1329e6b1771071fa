import { mount } from "svelte";
import App from "./app.svelte";
import { joinSession, shareSession, takeTokenFromLink } from "./api/session";
import "uplot/dist/uPlot.min.css";
import "./theme.css";
import { applyTheme } from "./components/theme";

applyTheme();
const offered = takeTokenFromLink();
await joinSession();
shareSession();
const target = document.getElementById("page");
if (target === null) throw new Error("index.html has no element with the id page");
mount(App, { target, props: { offered } });
