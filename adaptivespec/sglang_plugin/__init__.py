"""The only package that imports SGLang (besides `adaptivespec.cpu_engine`): the algorithm ADAPTIVE and its worker."""
