//! Progress of long work, as a bar on a terminal.

use std::{sync::Mutex, time::Duration};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use prorl_sandbox::images::Progress;

/// The bar of one image; nothing where standard error is no terminal.
pub(crate) struct Bar {
    bar: ProgressBar,
    name: Mutex<String>,
}

impl Bar {
    /// Makes a bar of its own.
    pub(crate) fn new(name: &str) -> Self {
        Self::with(ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()), name)
    }

    /// Makes one among others.
    pub(crate) fn among(bars: &MultiProgress, name: &str) -> Self {
        Self::with(bars.add(ProgressBar::new_spinner()), name)
    }

    fn with(bar: ProgressBar, name: &str) -> Self {
        bar.set_style(style(false));
        bar.enable_steady_tick(Duration::from_millis(200));
        bar.set_prefix(name.to_owned());
        Self { bar, name: Mutex::new(name.to_owned()) }
    }

    /// Takes it off the screen.
    pub(crate) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

fn style(has_length: bool) -> ProgressStyle {
    let template = if has_length {
        "{prefix} [{bar:32}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} eta {eta}"
    } else {
        "{prefix} {spinner} {elapsed}"
    };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    style.progress_chars("=> ")
}

impl Progress for Bar {
    fn begin(&self, part: &str, total: Option<u64>) {
        let name = self.name.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.bar.set_prefix(format!("{name}: {part}"));
        self.bar.set_position(0);
        match total {
            Some(total) => self.bar.set_length(total),
            None => self.bar.unset_length(),
        }
        self.bar.set_style(style(total.is_some()));
    }

    fn advance(&self, n_bytes: u64) {
        self.bar.inc(n_bytes);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.clear();
    }
}
