mod cases;
mod laws;
mod script;
