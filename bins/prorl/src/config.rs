//! Where each value of `prorl serve` comes from: flags, then `PRORL_*` variables, then the file, then defaults.

use std::{fmt, path::Path};

use anyhow::{Context, bail};
use clap::{ArgMatches, parser::ValueSource};
use serde::{Serialize, de::DeserializeOwned};

/// Where a value came from; the higher wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    Default,
    File,
    Environment,
    Flag,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flag => "flag",
            Self::Environment => "environment",
            Self::File => "file",
            Self::Default => "default",
        })
    }
}

/// Joins the layers, key by key, and remembers which one won.
pub(crate) struct Layers<'a> {
    given: &'a ArgMatches,
    file: toml::Table,
    chosen: Vec<(&'static str, String, Source)>,
}

impl<'a> Layers<'a> {
    /// Reads the configuration file, if there is one.
    pub(crate) fn new(given: &'a ArgMatches, file: Option<&Path>) -> anyhow::Result<Self> {
        let file = match file {
            None => toml::Table::new(),
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("failed to read the configuration {}", path.display()))?;
                text.parse().with_context(|| format!("{} is no TOML", path.display()))?
            }
        };
        Ok(Self { given, file, chosen: Vec::new() })
    }

    /// Decides one key that may stay without a value.
    pub(crate) fn optional<T>(&mut self, key: &'static str, given: Option<T>) -> anyhow::Result<Option<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        let from_file = match self.file.remove(key) {
            None => None,
            Some(value) => {
                let read = value.try_into::<T>();
                Some(read.map_err(|err| anyhow::anyhow!("{key} in the configuration file: {}", err.message()))?)
            }
        };
        let (value, source) = match (given, from_file) {
            (Some(value), _) => {
                let from_flag = self.given.value_source(key) == Some(ValueSource::CommandLine);
                (Some(value), if from_flag { Source::Flag } else { Source::Environment })
            }
            (None, Some(value)) => (Some(value), Source::File),
            (None, None) => (None, Source::Default),
        };
        let shown = match &value {
            Some(value) => toml::Value::try_from(value).map_or_else(|_| "?".to_owned(), |value| value.to_string()),
            None => String::new(),
        };
        self.chosen.push((key, shown, source));
        Ok(value)
    }

    /// Decides one key that has a default.
    pub(crate) fn or<T>(&mut self, key: &'static str, given: Option<T>, default: T) -> anyhow::Result<T>
    where
        T: Serialize + DeserializeOwned,
    {
        if let Some(value) = self.optional(key, given)? {
            return Ok(value);
        }
        if let Some(last) = self.chosen.last_mut() {
            last.1 = toml::Value::try_from(&default).map_or_else(|_| "?".to_owned(), |value| value.to_string());
        }
        Ok(default)
    }

    /// Returns where a key that was decided came from.
    pub(crate) fn source(&self, key: &str) -> Source {
        self.chosen.iter().find(|(chosen, ..)| *chosen == key).map_or(Source::Default, |(_, _, source)| *source)
    }

    /// Tells whether a key that was decided has a value that somebody gave.
    pub(crate) fn is_given(&self, key: &str) -> bool {
        self.source(key) != Source::Default
    }

    /// Returns what whoever gave a key's value calls it: its flag, its variable, or the key in the file.
    pub(crate) fn name(&self, key: &str) -> String {
        match self.source(key) {
            Source::Flag => format!("--{}", key.replace('_', "-")),
            Source::Environment => format!("PRORL_{}", key.to_ascii_uppercase()),
            Source::File => format!("{key} in the configuration file"),
            Source::Default => format!("the default of {key}"),
        }
    }

    /// Refuses keys of the file that nobody asked for; returns every value with its source.
    pub(crate) fn finish(self) -> anyhow::Result<String> {
        if let Some(unknown) = self.file.keys().next() {
            let known: Vec<_> = self.chosen.iter().map(|(key, ..)| *key).collect();
            bail!("unknown key {unknown} in the configuration file, expected one of {}", known.join(", "));
        }
        let lines = self.chosen.iter().map(|(key, value, source)| match value.as_str() {
            "" => format!("# {key} is not set"),
            value => format!("{key} = {value} # {source}"),
        });
        Ok(lines.collect::<Vec<_>>().join("\n"))
    }
}
