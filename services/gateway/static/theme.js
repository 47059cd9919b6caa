/* Before anything is drawn, so that no page flashes in the other theme. */
try {
  document.documentElement.dataset.theme = JSON.parse(localStorage.getItem("settings")).theme;
} catch { /* no settings, or no storage */ }
