"""The vocabulary: types, protocols, errors, config, plugins, http, db, telemetry."""
