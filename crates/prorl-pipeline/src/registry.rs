//! Handlers by name.

use std::{collections::BTreeMap, fmt, sync::Arc};

use crate::AgentHandler;

/// A name that is registered already.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("handler name {0:?} is registered already")]
pub struct RegistryError(pub String);

/// The handlers that a pipeline knows, chosen by `instance.data_source`.
#[derive(Clone, Default)]
pub struct Registry {
    handlers: BTreeMap<String, Arc<dyn AgentHandler>>,
}

impl Registry {
    /// Adds a handler under its name and aliases.
    ///
    /// # Errors
    /// When one of the names is taken; nothing is registered then.
    pub fn register(&mut self, handler: impl AgentHandler) -> Result<(), RegistryError> {
        let handler: Arc<dyn AgentHandler> = Arc::new(handler);
        let names: Vec<String> = std::iter::once(handler.name()).chain(handler.aliases()).map(str::to_owned).collect();
        if let Some(taken) = names.iter().enumerate().find_map(|(idx, name)| {
            (self.handlers.contains_key(name) || names[..idx].contains(name)).then(|| name.clone())
        }) {
            return Err(RegistryError(taken));
        }
        for name in names {
            self.handlers.insert(name, Arc::clone(&handler));
        }
        Ok(())
    }

    /// Returns the handler of a name or alias.
    pub fn get(&self, name: &str) -> Option<&Arc<dyn AgentHandler>> {
        self.handlers.get(name)
    }

    /// Returns every name and alias, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.handlers.keys().map(String::as_str)
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.handlers.keys()).finish()
    }
}
